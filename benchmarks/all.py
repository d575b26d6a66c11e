"""Run all benchmarks in turn and render their results. Run: python benchmarks/all.py [--quick] [--data DIR] [NAME ...].

Each result is the JSON line that a benchmark prints last, kept in results.jsonl with the command, the machine and the
commit of the code; the table of RESULTS.md is rendered from that file, and growth.svg drawn. Only full runs on a quiet
machine are kept: where other processes use the same processors, before a run or during it, results are shown and not
recorded. Of --quick only the time is kept, in quick.json. `make bench` runs this; `--stale` lists what was recorded
before a check or a commit and what has had its code changed since.

It exits with 1 where a benchmark failed, and where a goal that the record before reached is missed or no longer
measured: what fell is named, and recorded all the same.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import growth
from checks import missing, targets

HERE = Path(__file__).resolve().parent
NAMES = (
    "decode", "constraint", "ground", "finetune", "quantize", "embed", "parquet", "pipeline", "startup", "growth",
)  # fmt: skip
RECORDS, PAGE, PLOT = HERE / "results.jsonl", HERE / "RESULTS.md", HERE / "growth.svg"
QUICK = HERE / "quick.json"  # seconds of each benchmark's --quick
OURS = ("benchmarks/results.jsonl", "benchmarks/RESULTS.md", "benchmarks/growth.svg", "benchmarks/quick.json")
BEGIN, END = "<!-- results -->", "<!-- end of results -->"
BUSY = 0.1  # of the time of the processors at hand, used by others: from there on nothing is recorded
STAT = Path("/proc/stat")
LEFTOVERS = 10  # seconds to wait for processes that a benchmark's own left behind as they ended


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help="the small sizes, under a minute each; only their time is recorded"
    )
    parser.add_argument("--data", metavar="FOLDER", help="finetune: compare on the data there, too")
    parser.add_argument("--stages", metavar="A,B", help="growth: measure these, keep what is recorded of the others")
    parser.add_argument("--stale", action="store_true", help="run nothing: list the records to measure again, and why")
    parser.add_argument("--render", action="store_true", help="run nothing: write the page from what is recorded")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(NAMES)}; all when none is given")
    args = parser.parse_args()
    unknown = set(args.names) - set(NAMES)
    if unknown:
        parser.error(f"no benchmark is called {', '.join(sorted(unknown))}; they are {', '.join(NAMES)}")
    records = {record["name"]: record for record in read_records()}
    if args.stale:
        for name in args.names or NAMES:
            for reason in stale(records[name]) + changed(records[name]) if name in records else ["not recorded"]:
                print(f"{name}: {reason}")
        return 0
    if args.render:
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_records()), encoding="utf-8")
        return 0
    failed, fell = [], []
    for name in args.names or NAMES:
        busy, code = busy_now(), commit()
        options = ["--quick"] * args.quick + ["--json"]
        if args.data and name == "finetune":
            options += ["--data", args.data]
        if args.stages and name == "growth":
            options += ["--stages", args.stages]
        command = [f"benchmarks/{name}.py", *options]
        print(f"\n== python {' '.join(command)}", flush=True)
        done, took, others = run(command)
        print(done.stdout, flush=True)
        if done.returncode:
            failed.append(name)
            continue
        record = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {took:.0f} s")
        if max(busy, others) > BUSY:
            print(
                f"{name}: not recorded (other processes used {busy:.0%} of the processors before the run, {others:.0%}"
                " during it)"
            )
            continue
        if args.quick:
            times = {**read_quick(), name: round(took)}
            QUICK.write_text(json.dumps({n: times[n] for n in NAMES if n in times}) + "\n", encoding="utf-8")
            print(f"{name}: of the quick form only the time is recorded")
        else:
            record["commit"] = code
            if "sizes" in record:
                record = growth.joined(records.get(name), record)
                growth.draw(record["sizes"], PLOT)
            fell += [f"{name}: {what}" for what in fallen(records.get(name), record)]
            shown = " ".join("BEAUTY" if part == args.data else part for part in command)
            records[name] = record | {"command": f"python {shown}", "machine": machine()}
            if "--stages" in command:  # the record is of all parts, the time of one
                records[name]["command"] = f"python benchmarks/{name}.py --json, in parts"
            else:
                records[name]["minutes"] = round(took / 60, 1)
            RECORDS.write_text("".join(json.dumps(records[n]) + "\n" for n in NAMES if n in records), encoding="utf-8")
        PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), read_records()), encoding="utf-8")
    for what in fell:
        print(f"fell: {what}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed or fell else 0


def read_records() -> list[dict[str, Any]]:
    """The recorded results, in the order of NAMES."""
    lines = RECORDS.read_text(encoding="utf-8").splitlines() if RECORDS.exists() else []
    return [json.loads(line) for line in lines]


def read_quick() -> dict[str, int]:
    """Seconds of the quick forms that are recorded."""
    return json.loads(QUICK.read_text(encoding="utf-8")) if QUICK.exists() else {}


def stale(record: dict[str, Any]) -> list[str]:
    """Why a record is not what today's code would write; empty where it is."""
    reasons = []
    if lacking := missing(record["name"], record["equal"]):
        reasons.append(f"before the check of {', '.join(lacking)}")
    if "commit" not in record:
        reasons.append("before commits were recorded")
    return reasons


def changed(record: dict[str, Any]) -> list[str]:
    """How the code that a record measured differs from today's files: what git tells of each of its commits.

    Any change counts, one of a docstring, too: whether figures changed with it only another run tells.
    """
    reasons, paths = [], measured(record["name"])
    for code in record["commit"].split(", ") if "commit" in record else []:
        name = code.rstrip("+")
        try:
            git("rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
            files = git("diff", "--name-only", name, "--", *paths).splitlines()
        except (OSError, subprocess.CalledProcessError):
            reasons.append(f"git does not know its commit, {name}")
            continue
        if code != name:
            reasons.append(f"measured with changes that are not in {name}")
        if files:
            more = f" and {len(files) - 3} more" if len(files) > 3 else ""
            reasons.append(f"code changed since {name}: {', '.join(files[:3])}{more}")
    return reasons


def measured(name: str) -> list[str]:
    """What a benchmark measures and is made of, as paths for git; not checks.py, which `stale` compares by name."""
    source = (HERE / f"{name}.py").read_text(encoding="utf-8")
    imported = re.findall(r"^ *(?:from|import) (\w+)", source, re.MULTILINE)
    own = sorted(module for module in {name, *imported} - {"checks"} if (HERE / f"{module}.py").is_file())
    graph = ["pipelines/*.py", "pipelines/presets", "components/*.py"] if name == "pipeline" else []
    return ["shared/sidgraft", *(f"benchmarks/{module}.py" for module in own), *graph]


def fallen(old: dict[str, Any] | None, new: dict[str, Any]) -> list[str]:
    """The goals that a record reached and the next one misses, or has no value for."""

    def goals(record: dict[str, Any]) -> dict[str, Any]:
        return record["ratios"] | targets(record["name"], record["equal"])

    now, lines = goals(new), []
    for what, (value, goal) in goals(old).items() if old else ():
        if value < goal:
            continue
        if what not in now:
            lines.append(f"{what}: {value:.4g} (goal {goal:g}) before, not measured now")
        elif now[what][0] < now[what][1]:
            lines.append(f"{what}: {value:.4g} (goal {goal:g}) before, {now[what][0]:.4g} (goal {now[what][1]:g}) now")
    return lines


def git(*arguments: str) -> str:
    """What git prints about the checkout. Raises OSError without git, CalledProcessError where it refuses."""
    return subprocess.run(
        ["git", *arguments], cwd=HERE.parent, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ).stdout.strip()


def commit() -> str:
    """The short name of the code's commit, with a + where files were changed since; what this writes does not count."""
    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{name}" for name in OURS))
        return git("rev-parse", "--short", "HEAD") + "+" * bool(changed)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"  # not a checkout of git


def run(command: list[str]) -> tuple[subprocess.CompletedProcess[str], float, float]:
    """Run a benchmark: what came of it, its seconds, and the share of the processors that others used meanwhile.

    A process whose parent has ended, such as the server that a local run's stages are forks of, becomes a child of this
    one (a "subreaper", prctl(2)) and is waited for: without that its time would count as that of others.
    """
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    started, before = time.monotonic(), clock()
    done = subprocess.run([sys.executable, *command], cwd=HERE.parent, stdout=subprocess.PIPE, text=True)
    took = time.monotonic() - started
    while time.monotonic() < started + took + LEFTOVERS:
        try:
            ended, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if not ended:
            time.sleep(0.05)
    return done, took, used_by_others(before, clock())


def busy_now() -> float:
    """Share of the processors that others use, over a second in which this process sleeps."""
    before, _ = clock(), time.sleep(1)
    return used_by_others(before, clock())


def clock() -> tuple[float, float, float]:
    """Seconds so far: of the processors that this process may use, idle ones, those of it and its ended children."""
    mine = {f"cpu{n}" for n in os.sched_getaffinity(0)}
    lines = [line.split() for line in STAT.read_text().splitlines()]
    ticks = [[int(n) for n in fields[1:9]] for fields in lines if fields[0] in mine]  # user to steal
    a_second = os.sysconf("SC_CLK_TCK")
    idle = sum(each[3] + each[4] for each in ticks)  # with nothing to do, and waiting for a disk
    return sum(map(sum, ticks)) / a_second, idle / a_second, sum(os.times()[:4])


def used_by_others(before: tuple[float, float, float], after: tuple[float, float, float]) -> float:
    """Share of the processors' time between two readings of `clock` that was neither idle nor this process's own."""
    every, idle, ours = (b - a for a, b in zip(before, after, strict=True))
    return max(every - idle - ours, 0.0) / max(every, 1e-9)


def machine() -> str:
    """The machine in general terms: processors and instruction set."""
    flags = Path("/proc/cpuinfo").read_text().split() if Path("/proc/cpuinfo").exists() else []
    known = {"amx_bf16": "AMX", "avx512_bf16": "AVX512-BF16", "avx512f": "AVX512", "avx2": "AVX2"}
    best = next((name for flag, name in known.items() if flag in flags), "")
    return ", ".join(part for part in (f"{os.cpu_count()} cores", platform.machine(), best) if part)


def with_table(page: str, records: list[dict[str, Any]]) -> str:
    """The page with the text between its two marks replaced by the table of these records."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(records)}\n{END}{after}"


def table(records: list[dict[str, Any]]) -> str:
    """Markdown: one line a ratio, one line an equality with a goal, growth by parts, and each benchmark's facts."""
    absent = [name for name in NAMES if name not in {record["name"] for record in records}]
    lines = []
    if records:
        lines += ["| benchmark | against | times faster | goal | reached |", "|---|---|---|---|---|"]
    for record in records:
        for peer, (ratio, goal) in record["ratios"].items() if "sizes" not in record else ():
            lines.append(f"| {record['name']} | {peer} | {ratio:.4g} | {goal:g} | {'yes' if ratio >= goal else 'no'} |")
    aimed = [
        (record["name"], *found) for record in records for found in targets(record["name"], record["equal"]).items()
    ]
    if aimed:
        lines += ["", "| benchmark | equality | value | goal | reached |", "|---|---|---|---|---|"]
    for name, what, (value, goal) in aimed:
        lines.append(f"| {name} | {what} | {value:.4g} | {goal:g} | {'yes' if value >= goal else 'no'} |")
    lines += [line for record in records if "sizes" in record for line in growth_table(record)]
    lines += [""] if records else []
    for record in records:
        facts = [
            ", ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in record[part].items())
            for part in ("equal", "roof")
        ]
        took = f", {record['minutes']:g} minutes" if "minutes" in record else ""
        of = f", commit {record['commit']}" if "commit" in record else ""
        old = "".join(f" **{reason[0].upper()}{reason[1:]}.**" for reason in stale(record))
        lines.append(
            f"- **{record['name']}** ({record['about']}): `{record['command']}` on {record['machine']},"
            f" threads: {record['threads']}{took}{of}.{old} Equal: {facts[0]}. Roof: {facts[1]}."
        )
        if record["name"] == "startup":
            lines[-1] += (
                " Seconds: " + ", ".join(f"{what} {took:.3g}" for what, took in record["seconds"].items()) + "."
            )
    if any("sizes" in record for record in records):
        lines.append(f"\n![Time and peak memory against items, with the exponents of growth]({PLOT.name})")
    if quick := read_quick():
        lines.append(f"\nSeconds with `--quick`: {', '.join(f'{name} {took}' for name, took in quick.items())}.")
    if absent:
        lines.append(f"\nNot measured on a quiet machine yet: {', '.join(absent)}.")
    return "\n".join(lines).strip()


def growth_table(record: dict[str, Any]) -> list[str]:
    """Markdown: time and memory of each part by size, and the exponent p of the N^p that fits them, with its goal."""
    sizes = sorted({row["items"] for row in record["sizes"]})
    heads = ["growth of", "", *(f"{size:,} items" for size in sizes)]
    heads += ["exponent", "exponent of the two largest", "goal", "reached"]
    lines = ["", f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    goals = dict(record["ratios"])
    for part in dict.fromkeys(row["stage"] for row in record["sizes"]):
        rows = [row for row in record["sizes"] if row["stage"] == part]
        for what, name, unit in (("seconds", "time", "s"), ("megabytes", "memory", "MB")):
            inverse = goals.pop(f"linear growth of {part}, {name}", None)
            at = {row["items"]: f"{row[what]:,.0f}" if row[what] >= 100 else f"{row[what]:.3g}" for row in rows}
            figures = [at.get(size, "") for size in sizes]
            slopes = [f"{fit(rows, what):.2f}" for fit in (growth.exponent, growth.last_slope)]
            reached = (
                [f"at most {1 / inverse[1]:.3g}", "yes" if inverse[0] >= inverse[1] else "no"] if inverse else ["", ""]
            )
            lines.append(f"| {part} | {' | '.join([f'{name}, {unit}', *figures, *slopes, *reached])} |")
    if goals:
        lines += ["", "| growth, other goals | times within it | goal | reached |", "|---|---|---|---|"]
    for what, (ratio, goal) in goals.items():
        lines.append(f"| {what} | {ratio:.4g} | {goal:g} | {'yes' if ratio >= goal else 'no'} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
