"""A scalar twin of the planner: the same placement rules, written for one probe at a time."""

import itertools
import math
from fractions import Fraction

import numpy as np
from plans import planned

INT32_MAX = 2**31 - 1
RULES = tuple(itertools.product((True, False), (False, True), ("even", "whole", "whole even")))


def twin_probe(loads, ranks, slots, min_tokens, threshold, group, hot_first, fits, kind):
  """Slots of each rank as ``[(expert, tokens)]``, and the experts and takers in order."""
  per_rank = len(loads) // ranks
  left = list(loads)
  load = rank_loads(loads, [[] for _ in range(ranks)], group).tolist()
  held, order = [[] for _ in range(ranks)], []
  sources = sorted((r for r in range(ranks) if load[r] > threshold), key=lambda r: (-load[r], r))
  for source in sources if hot_first else reversed(sources):
    own = range(source * per_rank, (source + 1) * per_rank)
    for expert in sorted(own, key=lambda e: (-loads[e], e)):
      while load[source] > threshold and left[expert]:
        slack = {
          r: threshold - group - load[r]
          for r in range(ranks)
          if load[r] < threshold - group and len(held[r]) < slots and expert not in dict(held[r])
        }
        if not slack:
          break
        need = load[source] - threshold
        empty = sum(slots - len(held[r]) for r in slack)
        floor = max(min_tokens, 1 if kind == "whole" else math.ceil(Fraction(need, empty)))
        piece = min(max(need, floor), left[expert]) if kind == "even" else left[expert]
        fitting = [r for r in slack if slack[r] >= piece]
        if fitting and fits:
          taker = min(fitting, key=lambda r: (slack[r], r))
        else:
          taker = min(slack, key=lambda r: (-slack[r], r))
        tokens = min(piece, slack[taker])
        if tokens < floor:
          break
        held[taker].append((expert, tokens))
        order.append((expert, taker))
        left[expert] -= tokens
        load[source] -= tokens + (0 if left[expert] else group)
        load[taker] += tokens + group
  return held, order


def twin_construction(loads, ranks, slots):
  per_rank = len(loads) // ranks
  left = list(loads)
  load = [sum(loads[r * per_rank : (r + 1) * per_rank]) for r in range(ranks)]
  held, order = [[] for _ in range(ranks)], []
  cap = -(-sum(loads) // ranks)
  waiting = list(range(ranks))
  while max(load) > cap:
    giver = load.index(max(load))
    receiver = min(waiting, key=lambda r: (load[r], r))
    waiting.remove(receiver)
    own = range(giver * per_rank, (giver + 1) * per_rank)
    for expert in sorted(own, key=lambda e: (-left[e], e)):
      tokens = min(cap - load[receiver], left[expert])
      if tokens:
        held[receiver].append((expert, tokens))
        order.append((expert, receiver))
        left[expert] -= tokens
        load[giver] -= tokens
        load[receiver] += tokens
  return held, order


def rank_loads(loads, held, group=0):
  """Rows of ranks, and ``group`` for every group of rows."""
  ranks = len(held)
  per_rank, left, load = len(loads) // ranks, list(map(int, loads)), []
  for expert, tokens in itertools.chain(*held):
    left[expert] -= tokens
  for rank, copies in enumerate(held):
    rows = left[rank * per_rank : (rank + 1) * per_rank] + [tokens for _, tokens in copies]
    load.append(sum(rows) + group * sum(size > 0 for size in rows))
  return np.array(load, np.int64)


def most_copies(held, order, per_rank, transfer):
  """The documented bound on what a rank sends or receives."""
  experts = [expert for expert, _ in order]
  if transfer != "direct":
    experts = list(dict.fromkeys(experts))
  sends = [sum(e // per_rank == home for e in experts) for home in range(len(held))]
  homes = [home for home, count in enumerate(sends) if count]
  if transfer != "direct":
    for expert in experts:
      for taker in [t for e, t in order if e == expert and t in homes][1:]:
        sends[taker] += 1
  return max(*sends, *map(len, held))


def time_cost(rows, copies, cost):
  """The documented cost, in Python's unbounded integers."""
  return min(INT32_MAX, max(rows, cost.link_rows * copies) + cost.copy_rows * copies)


def twin_plan(loads, ranks, config, cost=None):
  """The placement of one domain and its bound on copies."""
  slots, min_tokens = config.replica_slots, config.min_tokens_per_replica
  if slots == 0 or ranks == 1:
    return [[] for _ in range(ranks)], 0
  group, by_time = 0, config.objective == "time"
  if by_time:  # no load exceeds int32
    room = (INT32_MAX - sum(loads)) // (len(loads) + ranks * slots)
    group = min(cost.group_rows, room)
  before = rank_loads(loads, [[] for _ in range(ranks)], group)
  total, top = int(before.sum()), int(before.max())
  mean = -(-total // ranks)
  goal = 0 if config.target is None else math.ceil(Fraction(str(config.target)) * total / ranks)
  constructs = slots >= len(loads) * (1 - Fraction(1, ranks)) / ranks and min_tokens == 1
  thresholds = [(mean, group)]
  if not constructs or config.objective == "time" or config.target is not None:
    steps = [round(2 ** (15 - 15 * k / 38)) for k in range(39)]
    thresholds = [mean + -(-(top - mean) * step // 2**15) for step in steps] + [mean]
    thresholds += [goal] * (config.target is not None)
    thresholds = [(min(max(t, mean), top), group) for t in thresholds]
    if by_time:  # what a round holds, whatever groups cost
      most = max(cost.capacity_rows, -(-sum(loads) // ranks))
      thresholds.append((min(most, int(rank_loads(loads, [[]] * ranks).max())), 0))
  candidates = [
    twin_probe(loads, ranks, slots, min_tokens, *threshold, *rule)
    for threshold in dict.fromkeys(thresholds)
    for rule in RULES
  ]
  candidates += [twin_construction(loads, ranks, slots)] if constructs else []

  def keys(candidate):
    held, order = candidate
    busiest = int(rank_loads(loads, held, group).max())
    copies = most_copies(held, order, len(loads) // ranks, config.transfer)
    above, value = False, max(busiest, goal)
    if by_time:
      above = rank_loads(loads, held).max() > cost.capacity_rows
      value = time_cost(value, copies, cost)
    return above, value, sum(map(len, held)), copies, busiest

  best = min(candidates, key=keys)
  return best[0], keys(best)[3]


def placement(plan, domain, index):
  """The slots of one domain as the twin writes them."""
  replica_expert, quota, _ = planned(plan)
  experts, ranks = quota.shape
  first = index * domain * (experts // ranks)
  return [
    [(int(e) - first, int(quota[e, rank])) for e in replica_expert[rank] if e >= 0]
    for rank in range(index * domain, (index + 1) * domain)
  ]
