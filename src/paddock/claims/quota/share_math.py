"""The arithmetic of quota shares. Pure.

`TeamShares` holds how much of each limit every process (by its account) may use; the sum never
exceeds the limit. A process claims within its share without coordination, and changes the record,
by compare-and-swap, only to take more or to give back. It takes a block at a time; the less is
left, the smaller the block, in the end no more than it needs.

An open share counts in full whether it is used or not. A closed share (its process has stopped, or
is idle) counts by its usage, which can only shrink. A process whose cache does not yet include
everything written before a share was closed counts that share in full.
"""

from collections.abc import Mapping

from msgspec import Struct

from paddock.engine.versions import ordinal

BLOCK = 64
"""At most so many sandboxes beyond the need are taken at a time."""


class Share(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The amounts that one account may use, by usage name."""

    amounts: dict[str, int] = {}
    turn: int = 0
    """Grows with every write of its process: an unchanged share may belong to a dead process."""
    closed_at: str = ""
    """The store version up to which its process may have written; empty: the share is open."""


class TeamShares(Struct, frozen=True):
    """All shares of one team and its keys, by account."""

    shares: dict[str, Share] = {}


class LimitView(Struct, frozen=True, kw_only=True):
    """The usage of one limit, as one process sees it."""

    limit: int
    size: int
    """Usage of one more sandbox."""
    mine: int
    """Usage of this process, reservations included."""
    others: Mapping[str, int]
    """Usage of the other accounts."""
    unaccounted: int
    """Usage of sandboxes that were claimed without an account."""


def free(team_shares: TeamShares, me: str, line: str, view: LimitView, *, seen: int) -> int:
    """Return how much is neither used by us nor used by or granted to others."""
    left = view.limit - view.unaccounted - view.mine
    for account in team_shares.shares.keys() | view.others.keys():
        if account != me:
            left -= _held(team_shares.shares.get(account), line, view.others.get(account, 0), seen)
    return left


def _held(share: Share | None, line: str, used: int, seen: int) -> int:
    if share is None or (share.closed_at and ordinal(share.closed_at) <= seen):
        return used
    return max(share.amounts.get(line, 0), used)


def fitting_count(
    team_shares: TeamShares, me: str, views: Mapping[str, LimitView], *, seen: int
) -> int:
    """Return how many more sandboxes of the views' sizes would fit."""
    fitting = (
        free(team_shares, me, line, view, seen=seen) // view.size
        for line, view in views.items()
        if view.size
    )
    return min(fitting, default=BLOCK)


def block(team_shares: TeamShares, spare: int) -> int:
    """Return how many of the spare sandboxes one process may hold in advance."""
    users = max(sum(not share.closed_at for share in team_shares.shares.values()), 2)
    return min(BLOCK, max(spare, 0) // (2 * users))


def grown(
    team_shares: TeamShares, me: str, views: Mapping[str, LimitView], *, waiting: int, seen: int
) -> TeamShares | None:
    """Return the shares with ours enlarged by the need and a block; `None` if there is no room."""
    fitting = fitting_count(team_shares, me, views, seen=seen)
    if fitting < 1:
        return None
    needed = min(waiting, fitting)
    count = needed + block(team_shares, fitting - needed)
    return _with(
        team_shares, me, {line: view.mine + count * view.size for line, view in views.items()}
    )


def kept(
    team_shares: TeamShares, me: str, views: Mapping[str, LimitView], *, seen: int
) -> TeamShares | None:
    """Return the shares without our excess; `None` if there is none."""
    share = team_shares.shares.get(me)
    if share is None or share.closed_at or not views:
        return None
    left = fitting_count(team_shares, me, views, seen=seen)
    allowed = block(team_shares, left)
    amounts = dict(share.amounts)
    for line, view in views.items():
        spare = (amounts.get(line, 0) - view.mine) // view.size if view.size else 0
        # Keep twice the block, so that it is not taken and given back in turns.
        if spare > 2 * allowed:
            amounts[line] = view.mine + allowed * view.size
    if amounts == share.amounts:
        return None
    return _with(team_shares, me, amounts)


def renewed(team_shares: TeamShares, me: str) -> TeamShares:
    """Return the shares with ours marked as in use."""
    return _with(team_shares, me, {})


def closed(
    team_shares: TeamShares, account: str, *, at: str, amounts: Mapping[str, int]
) -> TeamShares:
    """Return the shares with one closed; `amounts` is its usage."""
    turn = team_shares.shares[account].turn + 1
    share = Share(amounts=dict(amounts), turn=turn, closed_at=at)
    return TeamShares({**team_shares.shares, account: share})


def without_ended(
    team_shares: TeamShares, me: str, used: Mapping[str, int], *, seen: int
) -> TeamShares:
    """Return the shares without closed ones that have no usage left; `used` is by account."""
    ended = {
        account
        for account, share in team_shares.shares.items()
        if account != me
        and share.closed_at
        and ordinal(share.closed_at) <= seen
        and not used.get(account)
    }
    return TeamShares(
        {account: share for account, share in team_shares.shares.items() if account not in ended}
    )


def _with(team_shares: TeamShares, me: str, amounts: Mapping[str, int]) -> TeamShares:
    before = team_shares.shares.get(me, Share())
    share = Share(amounts={**before.amounts, **amounts}, turn=before.turn + 1)
    return TeamShares({**team_shares.shares, me: share})
