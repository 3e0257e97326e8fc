"""What a job of each framework is after kills, resumed by the framework alone and with `unbroken`.

    python benchmarks/frameworks.py                        # two ranks, six kills each; about 25 minutes
    python benchmarks/frameworks.py --only lightning --trials 2

Both are struck by `unbroken prove`, in the same moments of their steps: an undisturbed run, then trials in which ranks
are killed and the job is started again until it ends. Prints a table for `docs/`.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path

from unbroken.prove.launch import OUT, Command
from unbroken.prove.run import Report, Settings, prove

HERE = Path(__file__).parent
EXAMPLES = {
    "transformers": "transformers_trainer.py",
    "accelerate": "accelerate_loop.py",
    "lightning": "lightning_trainer.py",
    "fabric": "fabric_loop.py",
}
STEPS, EVERY = 40, 7


def struck(script: tuple[str, ...], directory: Path, ranks: int, trials: int) -> list[Report]:
    """Each trial by itself: a proof ends at the first that differs."""
    command = Command((*script, "--out", OUT, "--steps", str(STEPS), "--every", str(EVERY)), ranks)
    return [
        prove(Settings(command, 1, ("rank", "all"), trials, 11, directory / str(trial), 180.0, only=trial))
        for trial in range(1, trials + 1)
    ]


def told(reports: list[Report]) -> str:
    """How many ended as the undisturbed run, and what came of the others."""
    trials = [report.trials[0] for report in reports]
    kills = sum(len(trial.strikes) for trial in trials)
    others: Counter[str] = Counter()
    for trial in trials:
        if trial.problem:
            others["did not come to its end"] += 1
        elif trial.difference is not None:
            others[f"differs in {', '.join(trial.difference.parts)}"] += 1
    text = f"{sum(trial.passed for trial in trials)} of {len(trials)} ({kills} kills)"
    return "; ".join([text, *(f"{count} {what}" for what, count in others.most_common())])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", choices=list(EXAMPLES))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--trials", type=int, default=4)
    args = parser.parse_args()
    print("| | ended as the undisturbed run, by itself | with `unbroken` |\n|---|---|---|")
    for name in [args.only] if args.only else EXAMPLES:
        with tempfile.TemporaryDirectory() as directory:
            own = struck((str(HERE / "own_resume.py"), name), Path(directory) / "own", args.ranks, args.trials)
            ours = (str(HERE.parent / "examples" / EXAMPLES[name]),)
            with_unbroken = struck(ours, Path(directory) / "ours", args.ranks, args.trials)
        print(f"| {name} | {told(own)} | {told(with_unbroken)} |", flush=True)


if __name__ == "__main__":
    main()
