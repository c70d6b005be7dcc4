"""GPU kernels on plain arrays, written in Pallas Mosaic GPU for Hopper.

They import jax, jaxlib and numpy alone and know nothing of ``ultraep_jax``, whose operations use
them where they run (``implementation="mosaic_gpu"``). Each equals the portable form of its
operation, bit for bit where integers or copies are concerned, but leaves unused rows and slots
unwritten.

The names here and the module ``tunings`` are public, all else is private. A module is imported
when a name of it is first used, as most load Mosaic, which takes longer than all of
``ultraep_jax``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
  from pallas_kernels.matmul.elementwise import elementwise
  from pallas_kernels.matmul.even_tiles import even_tiles_pay
  from pallas_kernels.matmul.gated import Gated, Projections, gated_beside, gated_matmul
  from pallas_kernels.matmul.gated_grads import gated_grads
  from pallas_kernels.matmul.grouped import (
    grouped_matmul,
    grouped_matmul_sum,
    matmul_beside,
    sum_beside,
  )
  from pallas_kernels.matmul.layout import EVEN, UNIT, MatmulTuning, Tile, choose_tile
  from pallas_kernels.matmul.row_tiles import short_comes_last
  from pallas_kernels.matmul.wgrad import grouped_matmul_wgrad, turns_for, wgrad_beside
  from pallas_kernels.planner.quota import plan_quota
  from pallas_kernels.routing.block import RoutingTuning
  from pallas_kernels.routing.rows import route_rows
  from pallas_kernels.routing.top_k import top_k
  from pallas_kernels.support import (
    HOPPER,
    NEEDS,
    check_mesh,
    device,
    generation,
    has_instructions,
    why_slow,
    why_unreachable,
    why_unsupported,
  )
  from pallas_kernels.transfer.combine import check_sizes, combine, combine_values
  from pallas_kernels.transfer.dispatch import Dispatched, dispatch, dispatch_scaled
  from pallas_kernels.transfer.gather import Gathered, gather
  from pallas_kernels.transfer.inbox import bounded_inbox
  from pallas_kernels.transfer.lists import TransferLists, transfer_lists
  from pallas_kernels.transfer.place import place, place_scaled
  from pallas_kernels.transfer.reduce_replicas import reduce_replicas, reduction
  from pallas_kernels.transfer.replicate import replicate, replication
  from pallas_kernels.transfer.scales import SCALED, num_scales
  from pallas_kernels.transfer.tiles import Transfer
  from pallas_kernels.transfer.tuning import (
    ExchangeTuning,
    TransferTuning,
    combining,
    dispatching,
  )
  from pallas_kernels.tunings import UNTUNED, Tunings

__all__ = [
  "EVEN",
  "HOPPER",
  "NEEDS",
  "SCALED",
  "UNIT",
  "UNTUNED",
  "Dispatched",
  "ExchangeTuning",
  "Gated",
  "Gathered",
  "MatmulTuning",
  "Projections",
  "RoutingTuning",
  "Tile",
  "Transfer",
  "TransferLists",
  "TransferTuning",
  "Tunings",
  "bounded_inbox",
  "check_mesh",
  "check_sizes",
  "choose_tile",
  "combine",
  "combine_values",
  "combining",
  "device",
  "dispatch",
  "dispatch_scaled",
  "dispatching",
  "elementwise",
  "even_tiles_pay",
  "gated_beside",
  "gated_grads",
  "gated_matmul",
  "gather",
  "generation",
  "grouped_matmul",
  "grouped_matmul_sum",
  "grouped_matmul_wgrad",
  "has_instructions",
  "matmul_beside",
  "num_scales",
  "place",
  "place_scaled",
  "plan_quota",
  "reduce_replicas",
  "reduction",
  "replicate",
  "replication",
  "route_rows",
  "short_comes_last",
  "sum_beside",
  "top_k",
  "transfer_lists",
  "turns_for",
  "wgrad_beside",
  "why_slow",
  "why_unreachable",
  "why_unsupported",
]
_MODULES = {
  "matmul.elementwise": ("elementwise",),
  "matmul.even_tiles": ("even_tiles_pay",),
  "matmul.gated": ("Gated", "Projections", "gated_beside", "gated_matmul"),
  "matmul.gated_grads": ("gated_grads",),
  "matmul.grouped": (
    "grouped_matmul",
    "grouped_matmul_sum",
    "matmul_beside",
    "sum_beside",
  ),
  "matmul.layout": ("EVEN", "UNIT", "MatmulTuning", "Tile", "choose_tile"),
  "matmul.row_tiles": ("short_comes_last",),
  "matmul.wgrad": ("grouped_matmul_wgrad", "turns_for", "wgrad_beside"),
  "planner.quota": ("plan_quota",),
  "routing.block": ("RoutingTuning",),
  "routing.rows": ("route_rows",),
  "routing.top_k": ("top_k",),
  "support": (
    "HOPPER",
    "NEEDS",
    "check_mesh",
    "device",
    "generation",
    "has_instructions",
    "why_slow",
    "why_unreachable",
    "why_unsupported",
  ),
  "transfer.combine": ("check_sizes", "combine", "combine_values"),
  "transfer.dispatch": ("Dispatched", "dispatch", "dispatch_scaled"),
  "transfer.gather": ("Gathered", "gather"),
  "transfer.inbox": ("bounded_inbox",),
  "transfer.lists": ("TransferLists", "transfer_lists"),
  "transfer.place": ("place", "place_scaled"),
  "transfer.reduce_replicas": ("reduce_replicas", "reduction"),
  "transfer.replicate": ("replicate", "replication"),
  "transfer.scales": ("SCALED", "num_scales"),
  "transfer.tiles": ("Transfer",),
  "transfer.tuning": ("ExchangeTuning", "TransferTuning", "combining", "dispatching"),
  "tunings": ("UNTUNED", "Tunings"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
  if name not in _MODULE_OF:
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
  return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
  return __all__
