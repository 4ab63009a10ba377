"""Schedules that split the backward pass: ZB-H1, ZB-V and DualPipe-V. No torch, no process.

The gradient of a stage's input (I) is what the stage before waits for; the gradients of its weights (W) can wait, and
fill the time in which a rank would else be idle. ZB-V and DualPipe-V place two stages on a rank, the first p stages
going down the ranks and the last p coming back, so that the last stage stands beside the first one.
"""

from __future__ import annotations

from collections import deque

from megafp8.parallel.actions import Action, first, needs


def zb_h1(ranks: int, micro_batches: int) -> list[list[Action]]:
    """1F1B with the weight gradients delayed into the bubbles, at the peak memory of 1F1B's first rank.

    Source: Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241), section 2.3 and figure 3.
    """
    orders = []
    for rank in range(ranks):
        warm = min(ranks - 1 - rank, micro_batches)
        order = [Action("F", rank, i) for i in range(warm)]
        for i in range(micro_batches):
            if warm + i < micro_batches:
                order.append(Action("F", rank, warm + i))
            order.append(Action("I", rank, i))
        orders.append(order)
    return fill_in_weights(orders, num_stages=ranks, limit=ranks)


def zb_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    """Two stages a rank in a V, no bubble between a rank's first and last action if F = I = W, memory of 1F1B.

    Source: Qi et al., Pipeline Parallelism with Controllable Memory (arXiv 2405.15362), section 3, V-ZB. The order of
    F and I is the paper's for at least 2 ranks - 1 micro-batches; fewer are those of a longer run left out.
    """
    whole = max(micro_batches, 2 * ranks - 1)
    orders = [first(_v_order(ranks, rank, whole), micro_batches) for rank in range(ranks)]
    return fill_in_weights(orders, num_stages=2 * ranks, limit=2 * ranks)


class _Queue:
    """Hands out a rank's actions of a V: of the stage on the way down or on the way back, micro-batches in order."""

    def __init__(self, ranks: int, rank: int, micro_batches: int) -> None:
        self.down, self.back, self.micro_batches = rank, 2 * ranks - 1 - rank, micro_batches
        self.actions: list[Action] = []
        self.counts: dict[tuple[str, int], int] = {}
        self.inputs_only: deque[tuple[int, int]] = deque()  # (stage, micro-batch) whose W is still to be done

    def add(self, kind: str, stage: int) -> None:
        """The next micro-batch's F, B or I of `stage`."""
        key = ("F" if kind == "F" else "B", stage)
        count = self.counts.get(key, 0)
        self.counts[key] = count + 1
        self.actions.append(Action(kind, stage, count))  # type: ignore[arg-type]
        if kind == "I":
            self.inputs_only.append((stage, count))

    def add_weight(self) -> None:
        """The W that waits longest."""
        self.actions.append(Action("W", *self.inputs_only.popleft()))

    def left(self, stage: int) -> bool:
        """Whether a forward pass of `stage` is still to be done."""
        return self.counts.get(("F", stage), 0) < self.micro_batches


def _v_order(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    """F and I of one rank of ZB-V, without W."""
    queue = _Queue(ranks, rank, micro_batches)
    down, back = queue.down, queue.back
    for _ in range(2 * (ranks - rank) - 1):
        queue.add("F", down)
    for _ in range(rank):
        queue.add("F", back)
        queue.add("F", down)
    for _ in range(ranks - rank):
        queue.add("F", back)
        queue.add("I", back)
    while queue.left(back):
        if queue.left(down):
            queue.add("F", down)
        queue.add("I", down)
        queue.add("F", back)
        queue.add("I", back)
    for _ in range(rank):
        queue.add("I", down)
        queue.add("I", back)
    for _ in range(ranks - rank):
        queue.add("I", down)
    return queue.actions


def dualpipe_v(ranks: int, micro_batches: int) -> list[list[Action]]:
    """Two stages a rank in a V; in the steady state each F stands beside a B of the other stage, to hide its messages.

    Only the passes of warm-up and cool-down are split into I and W. One micro-batch more alive than in 1F1B.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, and Sea AI Lab's V-shaped half of it, which needs no second
    copy of the parameters. The paper's order is for at least 2 ranks micro-batches; fewer are those of a longer run
    left out.
    """
    whole = max(micro_batches, 2 * ranks)
    return [first(_dualpipe_order(ranks, rank, whole), micro_batches) for rank in range(ranks)]


def _dualpipe_order(ranks: int, rank: int, micro_batches: int) -> list[Action]:
    queue = _Queue(ranks, rank, micro_batches)
    down, back = queue.down, queue.back
    below = ranks - 1 - rank  # ranks further down the V
    for _ in range(2 * below):
        queue.add("F", down)
    for _ in range(rank + 1):
        queue.add("F", down)
        queue.add("F", back)
    for _ in range(below):
        queue.add("I", back)
        queue.add_weight()
        queue.add("F", back)
    for _ in range(micro_batches - 2 * ranks + rank + 1):
        queue.add("F", down)
        queue.add("B", back)
        queue.add("F", back)
        queue.add("B", down)
    for _ in range(below):
        queue.add("B", back)
        queue.add("F", back)
        queue.add("B", down)
    half = (rank + 1) // 2
    for i in range(rank + 1):
        # the second half splits: nothing follows in the pipeline that could hide the weight gradients
        queue.add("I" if i > half or (i == half and rank % 2) else "B", back)
        queue.add("I" if i >= half else "B", down)
    for _ in range(below):
        queue.add_weight()
        queue.add("I", down)
    while queue.inputs_only:
        queue.add_weight()
    return queue.actions


def fill_in_weights(orders: list[list[Action]], *, num_stages: int, limit: int) -> list[list[Action]]:
    """Add the W actions to each rank's order of F and I, every pass taking one unit of time.

    A rank does its next F or I as soon as that can start; while it cannot, or while `limit` forward passes are alive
    (W ends a life), the W that waits longest is done. Source: the greedy rule of arXiv 2401.10241, section 3.1.
    """
    ranks = range(len(orders))
    done: dict[Action, int] = {}  # what others wait for -> time at which it is there
    free, alive, places = [0 for _ in ranks], [0 for _ in ranks], [0 for _ in ranks]
    waiting: list[deque[Action]] = [deque() for _ in ranks]
    lists: list[list[Action]] = [[] for _ in ranks]
    left = sum(2 * sum(a.kind == "I" for a in order) + sum(a.kind == "F" for a in order) for order in orders)
    now = 0
    while left:
        for rank in ranks:
            if free[rank] > now:
                continue
            action = orders[rank][places[rank]] if places[rank] < len(orders[rank]) else None
            need = needs(action, num_stages) if action else None
            blocked = action is None or (need is not None and done.get(need, now + 1) > now)
            if blocked or (action is not None and action.kind == "F" and alive[rank] >= limit):
                if not waiting[rank]:
                    continue
                action = waiting[rank].popleft()
                alive[rank] -= 1
            else:
                assert action is not None
                places[rank] += 1
                if action.kind == "I":
                    waiting[rank].append(Action("W", action.stage, action.micro_batch))
                alive[rank] += action.kind == "F"
                done[action._replace(kind="F" if action.kind == "F" else "B")] = now + 1
            lists[rank].append(action)
            free[rank] = now + 1
            left -= 1
        now += 1
        assert now <= 8 * sum(map(len, orders)) + 8, "an order of F and I that cannot be run"
    return lists
