"""The contract on every backend of `tests.store.backends`."""

from tests.store import contract


class TestCreating(contract.Creating):
    pass


class TestReading(contract.Reading):
    pass


class TestUpdating(contract.Updating):
    pass


class TestDeleting(contract.Deleting):
    pass


class TestCollectingGarbage(contract.CollectingGarbage):
    pass


class TestListing(contract.Listing):
    pass


class TestWatching(contract.Watching):
    pass


class TestVersions(contract.Versions):
    pass
