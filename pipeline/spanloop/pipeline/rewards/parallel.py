"""R7's scaffolds as declared rewards: PARL's r_parallel and r_finish with a schedule, by time or by what they hold up.

The built-in channels (``orchestration``) are reported always and paid by constant weights; METHODS 2.1 lets both weights go to 0.
"""

from __future__ import annotations

import msgspec

from spanloop.pipeline.rewards.orchestration import orchestration_rewards
from spanloop.pipeline.rewards.registry import Case, reward
from spanloop.schemas.errors import ConfigError
from spanloop.schemas.events import Reward

__all__ = ["parl"]

CHANNELS = {"parallel": "parl_parallel", "finish": "parl_finish"}


@reward("parl/1", family="R7")
def parl(case: Case) -> list[Reward]:
    """r_parallel or r_finish.

    Options: of ("parallel" or "finish").
    """
    of = str(case.option("of", ""))
    if of not in CHANNELS:
        raise ConfigError("reward parl/1 needs the option of = 'parallel' or of = 'finish'")
    found = orchestration_rewards(case.content, (0, 0), complete=case.complete)
    return [msgspec.structs.replace(r, name=f"parl:{of}") for r in found if r.name == CHANNELS[of]]
