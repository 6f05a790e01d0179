"""Sequential writes and reads through Shardwise's tier beside fio's, in turn: the median ratios as a Markdown table.

    apt install fio                                   # a Debian package, needed here only
    cargo build --release
    python3 bench/disk_vs_fio.py --path /mnt/nvme

Both sides write a fresh file of the same size with the same block size, depth and O_DIRECT, have it brought to the disk
(fsync, whose time counts on both sides), and read it from its start. Shardwise hashes every tile when it writes it and checks
it when it reads it; fio does neither. The order within a pair changes from pair to pair.
"""
import argparse, json, pathlib, shutil, statistics, subprocess, sys

HERE = pathlib.Path(__file__).resolve().parent


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", default=HERE.parent / "target/release/shardwise")
    parser.add_argument("--path", required=True, help="a folder on the disk")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--mebibytes", type=int, default=1024)
    parser.add_argument("--io", choices=["auto", "uring", "threads"], default="auto")
    parser.add_argument("--queue-depth", type=int, default=32)
    parser.add_argument("--block-size", type=int, default=1 << 20)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--buffer-count", type=int, default=12)
    return parser.parse_args()


def output_of(command):
    ran = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if ran.returncode:
        sys.exit(f"{command[0]}: exit code {ran.returncode}: {ran.stderr}")
    return ran.stdout


def ours(args):
    """Bytes a second of a write and of a read, and the line itself."""
    line = json.loads(output_of([
        args.program, "bench", "disk", args.path, "--sequential", "--mebibytes", args.mebibytes, "--io", args.io,
        "--queue-depth", args.queue_depth, "--block-size", args.block_size, "--threads", args.threads,
        "--buffer-count", args.buffer_count,
    ]))
    return line["write_bytes_per_second"], line["read_bytes_per_second"], line


def fio(args, method, direct):
    file = pathlib.Path(args.path) / "disk-vs-fio.tmp"
    jobs = 1 if method == "io_uring" else args.threads
    size = args.mebibytes * 2**20 // jobs // args.block_size * args.block_size
    common = [
        "fio", "--name=x", f"--filename={file}", f"--bs={args.block_size}", f"--size={size}", f"--direct={int(direct)}",
        "--output-format=json", "--group_reporting", f"--numjobs={jobs}", f"--offset_increment={size}",
        *(["--ioengine=io_uring", f"--iodepth={args.queue_depth}"] if method == "io_uring" else ["--ioengine=psync"]),
    ]
    rates = []
    try:
        file.unlink(missing_ok=True)
        for direction, more in ("write", ["--end_fsync=1"]), ("read", []):
            result = json.loads(output_of([*common, f"--rw={direction}", *more]))
            rates.append(result["jobs"][0][direction]["bw_bytes"])
    finally:
        file.unlink(missing_ok=True)
    return rates


def main():
    args = arguments()
    if not shutil.which("fio"):
        sys.exit("there is no fio; it is a Debian package: apt install fio")
    # What "auto" comes to here, and a first run for the disk and the clocks.
    _, _, line = ours(args)
    method, direct = line["method"], line["direct"]
    pairs = []
    for index in range(args.pairs):
        if index % 2:
            theirs, own = fio(args, method, direct), ours(args)[:2]
        else:
            own = ours(args)[:2]
            theirs = fio(args, method, direct)
        pairs.append((own, theirs))
    at_a_time = f"depth {args.queue_depth}" if method == "io_uring" else f"{args.threads} threads"
    print(f"{args.mebibytes} MiB, {args.pairs} pairs in turn, {method}, {'O_DIRECT' if direct else 'cached'}, "
          f"blocks of {args.block_size >> 10} KiB, {at_a_time}:\n")
    print("| | Shardwise | fio | median ratio | least | most |")
    print("|---|---|---|---|---|---|")
    for side, name in enumerate(["write and fsync", "read"]):
        ratios = [own[side] / theirs[side] for own, theirs in pairs]
        median = lambda which: statistics.median(pair[which][side] for pair in pairs) / 1e9
        print(f"| {name} | {median(0):.2f} GB/s | {median(1):.2f} GB/s | {statistics.median(ratios):.2f} "
              f"| {min(ratios):.2f} | {max(ratios):.2f} |")


if __name__ == "__main__":
    main()
