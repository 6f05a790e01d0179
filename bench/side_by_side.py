"""Shardwise and PyTorch on one machine in one sitting: runs in turn, medians and ratios as Markdown tables.

    cargo build --release
    python3 -m venv /tmp/peer && /tmp/peer/bin/pip install torch numpy     # about 5 GB, outside the project
    /tmp/peer/bin/python bench/side_by_side.py --rounds 7

PyTorch is no dependency of the project; it is needed here only. Every figure is the median over rounds of what the
programs themselves print: the median step of 14, the peak resident set of the process.
"""
import argparse, json, os, pathlib, platform, statistics, subprocess, sys

HERE = pathlib.Path(__file__).resolve().parent
OURS = HERE.parent / "target/release/shardwise"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]


def lines(command):
    """The JSON lines that a command prints."""
    ran = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if ran.returncode:
        sys.exit(f"{command}: {ran.stderr}")
    return [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]


def mib(n):
    return f"{n / 2**20:.0f} MiB"


def steps(rounds):
    commands = {
        "Shardwise full_shard": [OURS, "bench", "step"],
        "Shardwise none": [OURS, "bench", "step", "--strategy", "none"],
        "Shardwise full_shard, recompute": [OURS, "bench", "step", "--recompute"],
        "PyTorch FSDP2": [*TORCHRUN, HERE / "pytorch_fsdp.py", "fsdp2"],
        "PyTorch none": [*TORCHRUN, HERE / "pytorch_fsdp.py", "none"],
    }
    runs = {name: [] for name in commands}
    for _ in range(rounds):
        for name, command in commands.items():
            runs[name].append(lines([str(word) for word in command])[0])
    median = lambda name, key: statistics.median(run[key] for run in runs[name])
    base = {key: median("PyTorch FSDP2", key) for key in ("median_step_seconds", "peak_resident_bytes")}
    print(f"Training step, 2 ranks x 1 thread, batch 2 a rank, f32; medians of {rounds} rounds in turn:\n")
    print("| | step | of FSDP2's | least step | peak resident | of FSDP2's | growth over the bare process |")
    print("|---|---|---|---|---|---|---|")
    for name in commands:
        step, peak = median(name, "median_step_seconds"), median(name, "peak_resident_bytes")
        least = min(run["min_step_seconds"] for run in runs[name])
        growth = peak - median(name, "resident_bytes_before_model")
        print(f"| {name} | {step:.3f} s | {step / base['median_step_seconds']:.2f} | {least:.3f} s | {mib(peak)} "
              f"| {peak / base['peak_resident_bytes']:.2f} | {mib(growth)} |")
    pairs = [a["median_step_seconds"] / b["median_step_seconds"]
             for a, b in zip(runs["Shardwise full_shard"], runs["Shardwise none"])]
    print(f"\nfull_shard over none, pair by pair: median {statistics.median(pairs):.3f}, "
          f"from {min(pairs):.3f} to {max(pairs):.3f}\n")


def collectives(rounds):
    ours, gloo = {}, {}
    for _ in range(rounds):
        for results, command in ((ours, [OURS, "bench", "comm"]), (gloo, [*TORCHRUN, HERE / "pytorch_collectives.py"])):
            for line in lines([str(word) for word in command]):
                results.setdefault((line["collective"], line["mebibytes"]), []).append(line["gigabytes_per_second"])
    print(f"Collectives over 2 ranks, bytes of the whole buffer over the time of a call; medians of {rounds} rounds:\n")
    print("| | size | Shardwise shm | gloo | ratio |")
    print("|---|---|---|---|---|")
    for key in sorted(ours):
        a, b = statistics.median(ours[key]), statistics.median(gloo[key])
        print(f"| {key[0]} | {key[1]} MiB | {a:.1f} GB/s | {b:.2f} GB/s | {a / b:.1f} |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    import torch
    cpu = next((l.split(":")[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    print(f"{cpu}, {os.cpu_count()} cores, Linux {platform.release()}, torch {torch.__version__}\n")
    steps(rounds)
    collectives(rounds)


main()
