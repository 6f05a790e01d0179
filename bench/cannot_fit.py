"""A model that cannot fit: killed in memory under a limit, trained under the same limit with its state on a disk.

    cargo build --release
    python3 bench/cannot_fit.py --path /mnt/nvme

Makes a GPT-2 of as many blocks as give a model state (parameters, gradients and AdamW's two statistics: 16 bytes a
parameter) of at least four times what all ranks together may have, and runs it twice under the limit: once in memory, once
with `parameters` and `optimizer` on "nvme". The limit is on the address space of each rank (`ulimit -v`), or with `--cgroup`
on the memory of all of them together (a cgroup of version 2 in which this user may make groups). `--compare` runs it a third
time, in memory and without a limit, and compares the exported weights.
"""
import argparse, hashlib, json, os, pathlib, resource, shutil, struct, subprocess, sys, tempfile, threading, time

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
VOCABULARY, SEQ_LEN = 64, 32


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=HERE.parent / "target/release/shardwise")
    parser.add_argument("--path", required=True, help="a folder on the disk; the state rests below it")
    parser.add_argument("--limit-mib", type=int, default=256, help="what each rank may have")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--width", type=int, default=512, help="of the model; a block has 12 times its square")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--times", type=float, default=4.0, help="the state over the limit, at least")
    parser.add_argument("--cgroup", help="a cgroup folder to make a group in, instead of limiting addresses")
    parser.add_argument("--compare", action="store_true", help="also run without a limit, and compare the weights")
    parser.add_argument("--set", action="append", default=[], help="more settings of the run on the disk")
    return parser.parse_args()


def model(args):
    """The configuration, and the parameters that it has."""
    w = args.width
    block = 12 * w * w + 13 * w
    root = (VOCABULARY + SEQ_LEN) * w + 2 * w
    blocks = -(-int(args.times * args.limit_mib * MIB * args.ranks / 16 - root) // block)
    text = f"""[run]
name = "cannot-fit"
steps = {args.steps}
ranks = {args.ranks}
[model]
family = "gpt2"
n_layer = {blocks}
n_embd = {w}
n_head = 8
n_positions = {SEQ_LEN}
vocab_size = {VOCABULARY}
[data]
format = "tokens-u16"
seq_len = {SEQ_LEN}
[train]
global_batch = {2 * args.ranks}
micro_batch = 1
lr = 1e-4
[shard]
recompute = true
"""
    return text, blocks, root + blocks * block


class Watch(threading.Thread):
    """The most addresses and resident pages that any process below one had."""

    def __init__(self, pid):
        super().__init__(daemon=True)
        self.pid, self.peak, self.done = pid, {"VmPeak": 0, "VmHWM": 0}, False

    def run(self):
        while not self.done:
            for pid in self.children():
                try:
                    for line in open(f"/proc/{pid}/status"):
                        name, _, value = line.partition(":")
                        if name in self.peak:
                            self.peak[name] = max(self.peak[name], int(value.split()[0]) * 1024)
                except (OSError, ValueError):
                    pass
            time.sleep(0.004)

    def children(self):
        found = []
        for children in pathlib.Path(f"/proc/{self.pid}/task").glob("*/children"):
            try:
                found += children.read_text().split()
            except OSError:
                pass
        return found


def limited(args):
    """What a process does to itself before it becomes the program, and what is to be removed in the end."""
    limit = args.limit_mib * MIB
    if not args.cgroup:
        return lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)), None
    group = pathlib.Path(args.cgroup) / f"cannot-fit-{os.getpid()}"
    group.mkdir()
    (group / "memory.max").write_text(str(limit * args.ranks))
    if (group / "memory.swap.max").exists():
        (group / "memory.swap.max").write_text("0")
    return lambda: (group / "cgroup.procs").write_text(str(os.getpid())), group


def run(args, name, config, folder, settings, is_limited=True):
    """Runs the program; returns its exit code, what it said, how long it took and the peaks of its ranks."""
    output = folder / name
    command = [args.program, "train", config]
    for setting in [f"run.output_dir={json.dumps(str(output))}", *settings]:
        command += ["--set", setting]
    prepare, group = limited(args) if is_limited else (None, None)
    begun = time.monotonic()
    # The C library reserves 64 MiB of addresses for each thread that allocates, and never uses most of it. A limit on
    # addresses counts them, so all runs get one heap for all threads.
    environment = {**os.environ, "RUST_BACKTRACE": "0", "MALLOC_ARENA_MAX": "1"}
    process = subprocess.Popen([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, preexec_fn=prepare, env=environment)
    watch = Watch(process.pid)
    watch.start()
    said = process.communicate()[0]
    watch.done = True
    seconds = time.monotonic() - begun
    if group:
        group.rmdir()
    return process.returncode, said, seconds, watch.peak, output


def mib(n):
    return f"{n / MIB:,.0f} MiB"


def report(name, code, said, seconds, peak, output):
    print(f"\n## {name}\n")
    print(f"exit code {code} after {seconds:.0f} s; of a rank at most {mib(peak['VmPeak'])} of addresses, "
          f"{mib(peak['VmHWM'])} resident")
    if code:
        lines = [line for line in said.splitlines() if line.strip()]
        print("\n".join(f"    {line[:200]}" for line in lines[-4:]))
        return
    steps = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    for step in steps:
        print(f"    step {step['step']}: loss {step['loss']:.4f}, {step['step_seconds']:.2f} s")


def digest(output):
    return hashlib.sha256((output / "model/model.safetensors").read_bytes()).hexdigest()


def main():
    args = arguments()
    text, blocks, parameters = model(args)
    allowed, state = args.limit_mib * MIB * args.ranks, 16 * parameters
    what = "memory, in a cgroup" if args.cgroup else "addresses a rank (ulimit -v)"
    print(f"{args.ranks} ranks, {args.limit_mib} MiB of {what}: {mib(allowed)} allowed in all")
    print(f"gpt2 of {blocks} blocks of width {args.width}, {parameters:,} parameters: "
          f"{mib(state)} of state, {state / allowed:.2f} times what is allowed")
    free = shutil.disk_usage(args.path).free
    if free < state * 1.3:
        sys.exit(f"{args.path} has {mib(free)} free; the state and the exported model need {mib(state * 1.3)}")
    with tempfile.TemporaryDirectory(prefix="cannot-fit-", dir=args.path) as folder:
        folder = pathlib.Path(folder)
        # Something to learn: each token tells the next.
        tokens = [7 * i % VOCABULARY for i in range((2 * args.ranks * args.steps + 2) * (SEQ_LEN + 1))]
        (folder / "tokens.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens))
        config = folder / "config.toml"
        config.write_text(text)
        data = f"data.path={json.dumps(str(folder / 'tokens.bin'))}"
        swap = folder / "state"
        swap.mkdir()
        disk = [data, "offload.parameters=nvme", "offload.optimizer=nvme", f"offload.path={json.dumps(str(swap))}", *args.set]
        in_memory = run(args, "in-memory", config, folder, [data])
        report("In memory, under the limit", *in_memory)
        on_disk = run(args, "on-disk", config, folder, disk)
        report("Parameters and optimizer state on the disk, under the limit", *on_disk)
        same = True
        if args.compare:
            unlimited = run(args, "unlimited", config, folder, [data], is_limited=False)
            report("In memory, without a limit", *unlimited)
            same = unlimited[0] == 0 and on_disk[0] == 0 and digest(unlimited[4]) == digest(on_disk[4])
            print(f"\nthe exported weights are {'identical' if same else 'NOT identical'}")
        left = list(swap.iterdir())
        print(f"\nleft of the state on the disk after the run: {len(left)} files")
    shown = in_memory[0] != 0 and on_disk[0] == 0 and same and not left
    print("shown: it fails in memory and trains from the disk" if shown else "NOT shown")
    sys.exit(not shown)


if __name__ == "__main__":
    main()
