"""The algorithms by the names that `deft train` knows them by."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping

from deft.algorithms.algorithm import Algorithm
from deft.algorithms.cal_ql import CalQL
from deft.algorithms.cql import CQL
from deft.algorithms.dagger import DAgger
from deft.algorithms.decision_transformer import DecisionTransformer
from deft.algorithms.dsrl import DSRL
from deft.algorithms.fql import FQL, FQLOnline
from deft.algorithms.grpo import GRPO
from deft.algorithms.iql import IQL
from deft.algorithms.offline import OfflineAlgorithm
from deft.algorithms.ppo import PPO
from deft.algorithms.rebrac import ReBRAC
from deft.algorithms.recap import Recap, RecapOffline
from deft.algorithms.reward_model import RewardModelTraining
from deft.algorithms.sac import SAC
from deft.algorithms.sft import SFT
from deft.algorithms.td3 import TD3
from deft.algorithms.td3_bc import TD3BC
from deft.algorithms.vision import Vision

ONLINE_ALGORITHMS: dict[str, type[Algorithm]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "sac": SAC,
    "td3": TD3,
    "cal-ql": CalQL,
    "dsrl": DSRL,
    "dagger": DAgger,
    "fql-online": FQLOnline,
    "recap": Recap,
}
OFFLINE_ALGORITHMS: dict[str, type[OfflineAlgorithm]] = {
    "iql": IQL,
    "cql": CQL,
    "td3-bc": TD3BC,
    "rebrac": ReBRAC,
    "fql": FQL,
    "dt": DecisionTransformer,
    "sft": SFT,
    "reward-model": RewardModelTraining,
    "recap-offline": RecapOffline,
    "vision": Vision,
}
# A view of both, so that an algorithm added to either is found here.
ALGORITHMS: Mapping[str, type[Algorithm]] = ChainMap(ONLINE_ALGORITHMS, OFFLINE_ALGORITHMS)  # type: ignore[arg-type]
