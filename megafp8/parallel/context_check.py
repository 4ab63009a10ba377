"""What context parallelism refuses before anything starts. No torch here."""

from __future__ import annotations


def sequence_problems(length: int, *, cp: int, shards: int, experts: bool = False) -> list[str]:
    """Whether a sequence divides over its ranks: a line if not.

    Args:
        length: tokens in a sequence.
        cp: ranks that share it, each with two chunks of equal size.
        shards: into how many parts a rank's tokens are cut over tp: tp under sequence parallelism or where experts
            need it, else 1.
        experts: whether it is experts that need it.
    """
    if cp == 1:
        unit, rule = shards, f"parallel.tp {shards}"
    elif shards == 1:
        unit, rule = 2 * cp, f"2 x parallel.cp {cp} = {2 * cp}"
    else:
        twice = "" if shards % 2 == 0 else "2 x "
        unit = cp * shards * (2 if twice else 1)
        rule = f"{twice}parallel.cp {cp} x parallel.tp {shards} = {unit}"
    if length % unit == 0:
        return []
    needs = "context parallelism needs"
    if shards > 1:
        needs = "experts need" if experts else "sequence parallelism needs"
    below, above = length // unit * unit, -(-length // unit) * unit
    way_out = f"nearest: {below} or {above}" if below else f"nearest: {above}"
    if shards > 1 and not experts and (cp == 1 or length % (2 * cp) == 0):
        way_out += ", or parallel.sequence_parallel = false"
    return [f"sequence_length {length} is not divisible by {rule}, as {needs}; {way_out}"]


def exchange_problems(exchange: str, *, cp: int, tp: int, num_heads: int) -> list[str]:
    """Whether the heads of a tp rank divide over cp, as an exchange of heads for tokens needs: a line if not.

    Key and value heads need not: they are repeated until they do.
    """
    if exchange != "all_to_all" or cp == 1 or num_heads % tp:
        return []
    heads = num_heads // tp
    if heads % cp == 0:
        return []
    divisors = [d for d in range(1, heads + 1) if heads % d == 0]
    near = " or ".join(str(d) for d in [d for d in divisors if d < cp][-1:] + [d for d in divisors if d > cp][:1])
    shown = f"model.num_attention_heads {num_heads}"
    shown += f" / parallel.tp {tp} = {heads} is" if tp > 1 else " is"
    return [
        f"parallel.cp_exchange = 'all_to_all': {shown} not divisible by parallel.cp {cp}; "
        f"nearest: parallel.cp = {near}, or parallel.cp_exchange = 'ring'"
    ]
