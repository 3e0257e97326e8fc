"""`unbroken rollback`: let the next start go on from an older checkpoint, or from one of an abandoned history."""

from __future__ import annotations

from typing import Annotated

import typer

from unbroken import generations
from unbroken.cli.output import path_text, print_json, stdout
from unbroken.cli.run import JsonOption, RunArgument, choose, complete_step, entries, open_run, progress_bar, step_text
from unbroken.cli.verify import fault_text
from unbroken.errors import DamagedCheckpoint, DirectoryProblem
from unbroken.generations import Generation
from unbroken.manifest import Manifest
from unbroken.store.local import LocalStore
from unbroken.verification import verify_checkpoint


def rollback(
    run: RunArgument,
    step: Annotated[
        str,
        typer.Option(help="The step to go back to.", show_default=False, autocompletion=complete_step),
    ],
    generation: Annotated[int | None, typer.Option(help="Of this start of the job, if several saved the step.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Make the next start of the job restore an older checkpoint, or one of an abandoned history.

    \b
    Example:
      unbroken rollback runs/gpt --step 40

    The checkpoint is read whole first; if it is damaged nothing happens. Then a new generation begins whose history
    comes from it. Nothing is deleted: newer checkpoints are abandoned, `unbroken ls` shows them as such, and
    another rollback can return to them. A job that is running finds itself taken over at its next save, saves no
    more and says so: end it first.

    It does not check whether your script's objects fit the checkpoint.

    \b
    Exit codes: 0 done; 1 the checkpoint is damaged; 2 wrong use, or there is no
    such checkpoint.
    """
    store = open_run(run)
    chosen = choose(store, step, generation)
    manifest = chosen.manifest
    assert manifest is not None, "choose takes none without"
    with progress_bar("verifying", sum(file.size for file in manifest.files)) as advance:
        verified = verify_checkpoint(store, chosen.place, None, advance)
    if not verified.usable:
        faults = "; ".join(fault_text(fault) for fault in verified.faults[:3])
        raise DamagedCheckpoint(f"step {step} cannot be restored, nothing was changed: {faults}")
    begun = _begin(store, manifest)
    left = [entry for entry in entries(store)[1] if entry.manifest is not None and not entry.on_lineage]
    if as_json:
        print_json(
            {
                "run": path_text(run),
                "generation": begun.number,
                "step": manifest.step,
                "micro_step": manifest.micro_step,
                "from_generation": manifest.generation,
                "abandoned": [entry.directory for entry in left],
            }
        )
        return
    stdout().print(
        f"the next start restores step {step_text(manifest)} of generation {manifest.generation}; "
        f"this is generation {begun.number}",
        soft_wrap=True,
    )
    if left:
        steps = ", ".join(step_text(entry) for entry in left)
        stdout().print(f"abandoned, not deleted: step {steps}", soft_wrap=True)


def _begin(store: LocalStore, manifest: Manifest) -> Generation:
    try:
        return generations.begin(store, manifest, manifest.world_size)
    except OSError as error:
        raise DirectoryProblem(
            f"cannot write to {store.root}/{generations.DIRECTORY}: {error.strerror or error}; nothing was changed"
        ) from error
