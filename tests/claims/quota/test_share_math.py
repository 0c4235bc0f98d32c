"""The arithmetic of quota shares, case by case."""

import pytest

from paddock.claims.quota import share_math
from paddock.claims.quota.share_math import LimitView, Share, TeamShares

LINE = "team:t sandbox.count all"


def view(limit: int, *, mine: int = 0, size: int = 1, others: int = 0, rest: int = 0) -> LimitView:
    return LimitView(
        limit=limit,
        size=size,
        mine=mine,
        others={"other": others} if others else {},
        unaccounted=rest,
    )


def shares(**amounts: int) -> TeamShares:
    return TeamShares({name: Share(amounts={LINE: amount}) for name, amount in amounts.items()})


@pytest.mark.parametrize(
    ("team_shares", "seen_by_me", "free"),
    [
        (shares(), view(10), 10),
        (shares(), view(10, mine=3, rest=2), 5),
        (shares(other=4), view(10), 6),
        (shares(other=4), view(10, others=1), 6),  # a share counts in full
        (shares(other=4), view(10, others=5), 5),  # or what is used, if that is more
        (shares(me=4), view(10, mine=1), 9),  # our own share is ours to use
        (shares(), view(10, others=3), 7),
        (shares(other=10), view(10, mine=1), -1),
    ],
)
def test_free_is_neither_used_nor_granted(
    team_shares: TeamShares, seen_by_me: LimitView, free: int
) -> None:
    assert share_math.free(team_shares, "me", LINE, seen_by_me, seen=0) == free


@pytest.mark.parametrize(("seen", "free"), [(4, 2), (5, 7), (6, 7)])
def test_a_closed_share_counts_by_usage_once_its_last_write_is_seen(seen: int, free: int) -> None:
    team_shares = share_math.closed(shares(other=8), "other", at="5", amounts={LINE: 8})
    assert share_math.free(team_shares, "me", LINE, view(10, others=3), seen=seen) == free


@pytest.mark.parametrize(
    ("limit", "waiting", "amount"),
    [
        (1000, 1, 1 + share_math.BLOCK),  # plenty: a whole block
        (41, 1, 11),  # a quarter of what is left
        (3, 1, 1),  # near the limit: only what is needed
        (3, 9, 3),
        (0, 1, None),
    ],
)
def test_blocks_shrink_as_the_quota_runs_out(limit: int, waiting: int, amount: int | None) -> None:
    grown = share_math.grown(shares(), "me", {LINE: view(limit)}, waiting=waiting, seen=0)
    assert (None if grown is None else grown.shares["me"].amounts[LINE]) == amount


def test_a_share_grows_by_the_size_of_a_sandbox() -> None:
    grown = share_math.grown(shares(), "me", {LINE: view(2000, size=1000)}, waiting=5, seen=0)
    assert grown is not None
    assert grown.shares["me"].amounts[LINE] == 2000


@pytest.mark.parametrize(
    ("mine", "share", "kept"),
    [
        (1, 1, None),
        (1, 49, None),  # twice what would be taken is kept, against going to and fro
        (0, 60, 25),
    ],
)
def test_the_unused_part_of_a_share_is_returned(mine: int, share: int, kept: int | None) -> None:
    found = share_math.kept(shares(me=share), "me", {LINE: view(100, mine=mine)}, seen=0)
    assert (None if found is None else found.shares["me"].amounts[LINE]) == kept


def test_every_write_of_a_share_raises_its_turn() -> None:
    team_shares = share_math.renewed(shares(me=3), "me")
    assert team_shares.shares["me"] == Share(amounts={LINE: 3}, turn=1)
    assert share_math.closed(team_shares, "me", at="7", amounts={}).shares["me"].turn == 2


@pytest.mark.parametrize(
    ("used", "seen", "is_kept"),
    [({}, 5, False), ({}, 4, True), ({"other": 1}, 5, True)],
)
def test_a_closed_share_is_removed_when_its_usage_is_zero(
    used: dict[str, int], seen: int, is_kept: bool
) -> None:
    team_shares = share_math.closed(shares(me=1, other=1), "other", at="5", amounts={})
    left = share_math.without_ended(team_shares, "me", used, seen=seen)
    assert ("other" in left.shares) == is_kept
    assert "me" in left.shares
