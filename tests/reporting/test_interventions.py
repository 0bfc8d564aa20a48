"""What a report says of alarms and of other targets, word by word."""

from __future__ import annotations

from snip_hf.records.interventions import Alarm, Retarget
from snip_hf.reporting.interventions import alarms_told, retargets_told


def alarm(action: str, **changes: object) -> Alarm:
    values = {"figure": "loss", "value": 9.0, "limit": 2.0, "reason": "The loss 9 is above 2", "failures": 1}
    return Alarm(**{"step": 7, "action": action, **values, **changes})  # type: ignore[arg-type]


def test_an_alarm_is_told_with_what_followed() -> None:
    raised = {"a:forward": ("fp4", "fp8"), "a:grad_input": ("fp4", "fp8")}
    assert alarms_told(
        [
            alarm("noted"),
            alarm("raised", changes=raised, left_out=True),
        ]
    ) == [
        "Step 7: guard. The loss 9 is above 2.",
        "Step 7: guard. The loss 9 is above 2; raised the formats of 2 GEMMs, and left the step out.",
    ]


def test_another_target_is_told_with_both_values() -> None:
    fields = {"target_fp4_fraction": (0.75, [[1, 0.9], [8, 0.5]]), "rates": (None, "b200")}
    assert retargets_told([Retarget(step=5, fields=fields)]) == [
        "Step 5: resumed with another target. target_fp4_fraction was 0.75 and is 0.9 from step 1, 0.5 from step 8; "
        "rates was None and is 'b200'."
    ]
