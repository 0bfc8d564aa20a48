"""The plan that a command is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..planning.plan import PrecisionPlan


def load_plan(path: Path) -> PrecisionPlan:
    from ..planning.plan import PrecisionPlan
    from ..records.run_folder import FOLDER

    try:
        return PrecisionPlan.load(path)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{path} does not exist; expected a plan, e.g. OUTPUT_DIR/snip/plan.json.") from error
    except OSError:
        plans = [one for one in (path / "plan.json", path / FOLDER / "plan.json") if one.is_file()]
        if not path.is_dir():
            raise
        advice = f"give the plan in it: {plans[0]}" if plans else "expected a plan, e.g. OUTPUT_DIR/snip/plan.json."
        raise IsADirectoryError(f"{path} is a folder; {advice}") from None
