"""How a quota is shared out among processes: the arithmetic, pure.

A book says how much of each limit every process (by its account) may have; together never more
than the limit. A process claims within its share without asking anybody, and changes the book, by
compare-and-swap, only to take more or to give back. It takes a block at a time, a smaller one the
less is left, in the end no more than it needs.

The share of a process counts in full whether it is used or not. One that is closed (its process
has gone, or has nothing to do) counts for what is still there of it: that can only become less.
Who has not yet seen everything that was written before it was closed takes it as it stands.
"""

from collections.abc import Mapping

from msgspec import Struct

from paddock.engine.versions import ordinal

BLOCK = 64
"""At most so many sandboxes more than are needed are taken at a time."""


class Share(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one account may have, line by line."""

    amounts: dict[str, int] = {}
    turn: int = 0
    """Grows with every write of its process: a share that does not change may be a dead one's."""
    closed_at: str = ""
    """The store's version up to which its process may have written; empty: it is in use."""


class TeamShares(Struct, frozen=True):
    """Every share of one team and its keys, by account."""

    shares: dict[str, Share] = {}


class LimitView(Struct, frozen=True, kw_only=True):
    """What one process sees of one line."""

    limit: int
    size: int
    """What one more sandbox takes."""
    mine: int
    """What this process has, reservations included."""
    others: Mapping[str, int]
    """What was written for other accounts."""
    unaccounted: int
    """What was claimed without an account."""


def free(book: TeamShares, me: str, line: str, view: LimitView, *, seen: int) -> int:
    """Say how much of a line nobody has and nobody may take, beyond what we use."""
    left = view.limit - view.unaccounted - view.mine
    for account in book.shares.keys() | view.others.keys():
        if account != me:
            left -= _held(book.shares.get(account), line, view.others.get(account, 0), seen)
    return left


def _held(share: Share | None, line: str, used: int, seen: int) -> int:
    if share is None or (share.closed_at and ordinal(share.closed_at) <= seen):
        return used
    return max(share.amounts.get(line, 0), used)


def room(book: TeamShares, me: str, views: Mapping[str, LimitView], *, seen: int) -> int:
    """Say how many more sandboxes of the views' sizes would fit."""
    fitting = (
        free(book, me, line, view, seen=seen) // view.size
        for line, view in views.items()
        if view.size
    )
    return min(fitting, default=BLOCK)


def block(book: TeamShares, spare: int) -> int:
    """Say how many of those that are left one process may keep for itself."""
    users = max(sum(not share.closed_at for share in book.shares.values()), 2)
    return min(BLOCK, max(spare, 0) // (2 * users))


def grown(
    book: TeamShares, me: str, views: Mapping[str, LimitView], *, waiting: int, seen: int
) -> TeamShares | None:
    """Take what is needed and, where there is plenty, some more; `None` where it is not there."""
    fitting = room(book, me, views, seen=seen)
    if fitting < 1:
        return None
    needed = min(waiting, fitting)
    count = needed + block(book, fitting - needed)
    return _with(book, me, {line: view.mine + count * view.size for line, view in views.items()})


def kept(
    book: TeamShares, me: str, views: Mapping[str, LimitView], *, seen: int
) -> TeamShares | None:
    """Give back what one process should not keep for itself; `None` where that is nothing."""
    share = book.shares.get(me)
    if share is None or share.closed_at or not views:
        return None
    left = room(book, me, views, seen=seen)
    allowed = block(book, left)
    amounts = dict(share.amounts)
    for line, view in views.items():
        spare = (amounts.get(line, 0) - view.mine) // view.size if view.size else 0
        # Somewhat more than would be taken is kept, lest it goes to and fro.
        if spare > 2 * allowed:
            amounts[line] = view.mine + allowed * view.size
    if amounts == share.amounts:
        return None
    return _with(book, me, amounts)


def renewed(book: TeamShares, me: str) -> TeamShares:
    """Show that a share is in use."""
    return _with(book, me, {})


def closed(book: TeamShares, account: str, *, at: str, amounts: Mapping[str, int]) -> TeamShares:
    """Close a share, of which so much is in use."""
    turn = book.shares[account].turn + 1
    share = Share(amounts=dict(amounts), turn=turn, closed_at=at)
    return TeamShares({**book.shares, account: share})


def without_ended(book: TeamShares, me: str, used: Mapping[str, int], *, seen: int) -> TeamShares:
    """Leave out closed shares of which nothing is left; `used` is what each account still has."""
    ended = {
        account
        for account, share in book.shares.items()
        if account != me
        and share.closed_at
        and ordinal(share.closed_at) <= seen
        and not used.get(account)
    }
    return TeamShares(
        {account: share for account, share in book.shares.items() if account not in ended}
    )


def _with(book: TeamShares, me: str, amounts: Mapping[str, int]) -> TeamShares:
    before = book.shares.get(me, Share())
    share = Share(amounts={**before.amounts, **amounts}, turn=before.turn + 1)
    return TeamShares({**book.shares, me: share})
