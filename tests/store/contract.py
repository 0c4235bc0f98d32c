"""The contract of the Store port. Runs unchanged on each backend."""

import asyncio
from contextlib import aclosing
from datetime import UTC, datetime

import pytest
from msgspec import structs

from paddock.kit.errors import (
    AlreadyExistsError,
    ConflictError,
    InvalidError,
    NotFoundError,
    TooLargeError,
)
from paddock.resources.kinds.builtin import Lease
from paddock.resources.kinds.template import SandboxTemplate, SandboxTemplateStatus
from paddock.resources.meta import Key, with_meta
from paddock.resources.selectors import parse_fields, parse_labels
from paddock.store.port import Change, Propagation, Store
from tests.resources.mutation import accepted_changes, mappings
from tests.store.backends import Harness
from tests.store.objects import (
    PATIENCE_SECONDS,
    changes_since,
    eventually,
    exists,
    lease,
    owned_by,
    take,
    template,
    with_image,
    with_revision,
)


class Creating:
    async def test_create_sets_the_identity(self, store: Store, ns: str):
        before = datetime.now(UTC).replace(microsecond=0)
        made = await store.create(template(ns, "a", labels={"app": "x"}))

        assert made.key == Key(ns, "a")
        assert made.kind == "SandboxTemplate"
        assert made.api_version == "paddock.dev/v1alpha1"
        assert len(made.metadata.uid) == 36
        assert made.metadata.resource_version
        assert made.metadata.generation == 1
        assert made.metadata.creation_timestamp >= before
        assert made.metadata.creation_timestamp.microsecond == 0
        assert made.metadata.labels == {"app": "x"}
        assert made.spec.image == "base"

    async def test_get_returns_the_created_object(self, store: Store, ns: str):
        made = await store.create(template(ns, "a", annotations={"note": "héllo ☃"}))
        assert await store.get(SandboxTemplate, Key(ns, "a")) == made

    async def test_shared_objects_are_immutable(self, store: Store, ns: str):
        pod = {"spec": {"tolerations": [{"key": "x"}], "nodeSelector": {"a": "b"}}}
        draft = template(ns, "a", labels={"app": "x"}, annotations={"note": "y"})
        spec = structs.replace(draft.spec, env={"A": "1"}, pod_template=pod)
        made = await store.create(structs.replace(draft, spec=spec))
        page = await store.list(SandboxTemplate, namespace=ns)
        async with aclosing(store.watch(SandboxTemplate, namespace=ns)) as stream:
            seen = (await take(stream, 1))[0].object
            written = await store.update(with_image(made, "other"))
            changed = (await take(stream, 1))[0].object
        observed = await store.update_status(with_revision(written, "2"))
        got = await store.get(SandboxTemplate, made.key)

        for obj in (made, page.items[0], seen, written, changed, observed, got):
            assert mappings(obj) == 7
            assert list(accepted_changes(obj)) == []

    async def test_uids_are_unique(self, store: Store, ns: str):
        first = await store.create(template(ns, "a"))
        second = await store.create(template(ns, "b"))
        assert first.metadata.uid != second.metadata.uid

    async def test_identity_from_the_writer_is_ignored_on_create(self, store: Store, ns: str):
        long_ago = datetime(1999, 1, 1, tzinfo=UTC)
        wanted = template(
            ns,
            "a",
            uid="00000000-0000-0000-0000-000000000000",
            generation=77,
            creation_timestamp=long_ago,
            deletion_timestamp=long_ago,
        )
        made = await store.create(wanted)
        assert made.metadata.uid != wanted.metadata.uid
        assert made.metadata.generation == 1
        assert made.metadata.creation_timestamp > long_ago
        assert not made.is_deleting

    async def test_a_name_is_made_from_generate_name(self, store: Store, ns: str):
        names = set[str]()
        for _ in range(5):
            made = await store.create(template(ns, generate_name="pool-"))
            names.add(made.metadata.name)
            assert made.metadata.generate_name == "pool-"
        assert len(names) == 5
        assert all(name.startswith("pool-") and len(name) == 10 for name in names)

    async def test_a_long_generate_name_is_truncated(self, store: Store, ns: str):
        made = await store.create(template(ns, generate_name="p" * 100))
        assert len(made.metadata.name) <= 63

    async def test_name_has_priority_over_generate_name(self, store: Store, ns: str):
        made = await store.create(template(ns, "a", generate_name="pool-"))
        assert made.metadata.name == "a"

    async def test_create_ignores_status(self, store: Store, ns: str):
        made = await store.create(with_revision(template(ns, "a"), "r1"))
        assert made.status == SandboxTemplateStatus()
        assert (await store.get(SandboxTemplate, made.key)).status == SandboxTemplateStatus()

    async def test_create_with_status_keeps_status(self, store: Store, ns: str):
        made = await store.create(with_revision(template(ns, "a"), "r1"), with_status=True)
        assert made.status.revision == "r1"
        assert (await store.get(SandboxTemplate, made.key)).status.revision == "r1"

    async def test_creating_an_existing_name_fails(self, store: Store, ns: str):
        first = await store.create(template(ns, "a", labels={"n": "1"}))
        with pytest.raises(AlreadyExistsError):
            await store.create(template(ns, "a", labels={"n": "2"}))
        assert await store.get(SandboxTemplate, first.key) == first

    async def test_of_concurrent_creates_of_one_name_one_succeeds(self, store: Store, ns: str):
        tries = [store.create(template(ns, "a")) for _ in range(16)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(item, SandboxTemplate) for item in results) == 1
        assert sum(isinstance(item, AlreadyExistsError) for item in results) == 15

    async def test_names_are_separate_per_namespace_and_kind(self, store: Store, harness: Harness):
        one = await store.create(template(harness.namespace, "a"))
        two = await store.create(template(harness.other_namespace, "a", image="other"))
        await store.create(lease(harness.namespace, "a", "me"))
        assert await store.get(SandboxTemplate, one.key) == one
        assert await store.get(SandboxTemplate, two.key) == two

    @pytest.mark.parametrize(
        ("meta", "path"),
        [
            ({"name": "Upper"}, "metadata.name"),
            ({"name": "a" * 254}, "metadata.name"),
            ({"name": "-a"}, "metadata.name"),
            ({"name": "a/b"}, "metadata.name"),
            ({"name": ""}, "metadata.name"),
            ({"name": "a", "labels": {"k": "v" * 64}}, "metadata.labels"),
            ({"name": "a", "labels": {"not a key": "v"}}, "metadata.labels"),
            ({"name": "a", "labels": {"k": "-v"}}, "metadata.labels"),
            ({"name": "a", "annotations": {"a//b": "v"}}, "metadata.annotations"),
        ],
    )
    async def test_invalid_metadata_is_rejected_with_its_path(
        self, store: Store, ns: str, meta: dict[str, object], path: str
    ):
        with pytest.raises(InvalidError) as caught:
            await store.create(template(ns, **meta))  # pyright: ignore[reportArgumentType]
        assert any(problem.path.startswith(path) for problem in caught.value.problems)
        assert (await store.list(SandboxTemplate, namespace=ns)).items == ()

    async def test_an_object_that_is_too_large_is_rejected(self, store: Store, ns: str):
        huge = template(ns, "a", image="x" * 10_000_000)
        with pytest.raises((TooLargeError, InvalidError)):
            await store.create(huge)
        assert not await exists(store, SandboxTemplate, Key(ns, "a"))

    async def test_a_dry_run_of_create_stores_nothing(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"), dry_run=True)
        assert made.metadata.uid
        assert not await exists(store, SandboxTemplate, Key(ns, "a"))

    async def test_a_dry_run_fails_where_a_create_fails(self, store: Store, ns: str):
        await store.create(template(ns, "a"))
        with pytest.raises(AlreadyExistsError):
            await store.create(template(ns, "a"), dry_run=True)


class Reading:
    async def test_a_missing_object_is_not_found(self, store: Store, ns: str):
        with pytest.raises(NotFoundError):
            await store.get(SandboxTemplate, Key(ns, "a"))

    async def test_a_write_is_visible_at_once(self, store: Store, ns: str):
        obj = await store.create(template(ns, "a"))
        for number in range(10):
            obj = await store.update(with_image(obj, f"i{number}"))
            assert await store.get(SandboxTemplate, obj.key) == obj


class Updating:
    async def test_an_update_writes_metadata_and_spec(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        changed = with_meta(with_image(made, "new"), labels={"l": "1"}, annotations={"a": "2"})
        stored = await store.update(changed)

        assert stored.spec.image == "new"
        assert stored.metadata.labels == {"l": "1"}
        assert stored.metadata.annotations == {"a": "2"}
        assert int(stored.metadata.resource_version) > int(made.metadata.resource_version)
        assert await store.get(SandboxTemplate, made.key) == stored

    async def test_an_update_keeps_status(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        made = await store.update_status(with_revision(made, "r1"))
        stored = await store.update(with_revision(with_image(made, "new"), "mine"))
        assert stored.status.revision == "r1"

    async def test_a_status_update_keeps_the_rest(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        changed = with_meta(with_image(with_revision(made, "r1"), "new"), labels={"l": "1"})
        stored = await store.update_status(changed)
        assert stored.status.revision == "r1"
        assert stored.spec.image == "base"
        assert stored.metadata.labels == {}
        assert await store.get(SandboxTemplate, made.key) == stored

    async def test_generation_increases_only_when_the_spec_changes(self, store: Store, ns: str):
        obj = await store.create(template(ns, "a"))
        obj = await store.update(with_meta(obj, labels={"l": "1"}))
        obj = await store.update_status(with_revision(obj, "r1"))
        assert obj.metadata.generation == 1
        obj = await store.update(with_image(obj, "new"))
        assert obj.metadata.generation == 2
        obj = await store.update(with_meta(obj, annotations={"l": "1"}))
        assert obj.metadata.generation == 2

    async def test_a_stale_write_is_a_conflict(self, store: Store, ns: str):
        old = await store.create(template(ns, "a"))
        new = await store.update(with_image(old, "new"))
        with pytest.raises(ConflictError):
            await store.update(with_image(old, "late"))
        with pytest.raises(ConflictError):
            await store.update_status(with_revision(old, "late"))
        assert await store.get(SandboxTemplate, old.key) == new

    async def test_a_stale_write_without_changes_is_a_conflict(self, store: Store, ns: str):
        old = await store.create(template(ns, "a"))
        new = await store.update(with_image(old, "new"))
        stale = with_meta(new, resource_version=old.metadata.resource_version)
        with pytest.raises(ConflictError):
            await store.update(stale)

    async def test_a_write_without_a_version_is_invalid(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        unversioned = with_meta(with_image(made, "new"), resource_version="")
        for write in (store.update, store.update_status):
            with pytest.raises(InvalidError) as caught:
                await write(unversioned)
            assert caught.value.problems[0].path == "metadata.resourceVersion"

    async def test_a_write_to_a_deleted_object_is_not_found(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        await store.delete(SandboxTemplate, made.key)
        with pytest.raises(NotFoundError):
            await store.update(with_image(made, "new"))
        with pytest.raises(NotFoundError):
            await store.update_status(with_revision(made, "new"))

    async def test_a_write_to_a_recreated_object_is_a_conflict(self, store: Store, ns: str):
        first = await store.create(template(ns, "a"))
        await store.delete(SandboxTemplate, first.key)
        second = await store.create(template(ns, "a"))
        mixed = with_meta(
            with_image(first, "new"), resource_version=second.metadata.resource_version
        )
        with pytest.raises(ConflictError):
            await store.update(mixed)
        assert await store.get(SandboxTemplate, second.key) == second

    async def test_an_update_cannot_change_the_identity(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        long_ago = datetime(1999, 1, 1, tzinfo=UTC)
        changed = with_meta(
            with_image(made, "new"),
            generation=99,
            creation_timestamp=long_ago,
            deletion_timestamp=long_ago,
        )
        stored = await store.update(changed)
        assert stored.metadata.generation == 2
        assert stored.metadata.creation_timestamp == made.metadata.creation_timestamp
        assert stored.metadata.uid == made.metadata.uid
        assert not stored.is_deleting

    async def test_a_write_without_changes_creates_no_version_and_no_event(
        self, store: Store, ns: str
    ):
        made = await store.create(template(ns, "a"))
        made = await store.update_status(with_revision(made, "r1"))
        assert await store.update(made) == made
        assert await store.update_status(made) == made
        await store.update(with_image(made, "new"))
        since = made.metadata.resource_version
        async with aclosing(store.watch(SandboxTemplate, since=since, namespace=ns)) as stream:
            event = (await take(stream, 1))[0]
        assert event.object.spec.image == "new"

    async def test_of_concurrent_writes_of_one_version_one_succeeds(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        tries = [store.update(with_image(made, f"i{number}")) for number in range(16)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        won = [item for item in results if isinstance(item, SandboxTemplate)]
        assert len(won) == 1
        assert sum(isinstance(item, ConflictError) for item in results) == 15
        assert await store.get(SandboxTemplate, made.key) == won[0]

    async def test_writers_that_retry_after_a_conflict_all_succeed(self, store: Store, ns: str):
        await store.create(template(ns, "a", labels={"n": "0"}))

        async def increment() -> None:
            while True:
                obj = await store.get(SandboxTemplate, Key(ns, "a"))
                number = int(obj.metadata.labels["n"]) + 1
                try:
                    await store.update(with_meta(obj, labels={"n": str(number)}))
                except ConflictError:
                    continue
                return

        async with asyncio.timeout(PATIENCE_SECONDS), asyncio.TaskGroup() as tasks:
            for _ in range(12):
                tasks.create_task(increment())
        assert (await store.get(SandboxTemplate, Key(ns, "a"))).metadata.labels["n"] == "12"

    async def test_a_kind_without_status_can_be_updated(self, store: Store, ns: str):
        made = await store.create(lease(ns, "a", "me"))
        stored = await store.update(
            structs.replace(made, spec=structs.replace(made.spec, holder_identity="you"))
        )
        assert stored.spec.holder_identity == "you"
        assert (await store.get(Lease, made.key)).spec.renew_time == made.spec.renew_time

    async def test_an_update_with_invalid_metadata_changes_nothing(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        with pytest.raises(InvalidError):
            await store.update(with_meta(made, labels={"k": "no good"}))
        assert await store.get(SandboxTemplate, made.key) == made

    async def test_a_dry_run_of_update_changes_nothing(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        answer = await store.update(with_image(made, "new"), dry_run=True)
        assert answer.spec.image == "new"
        assert (
            await store.update_status(with_revision(made, "r"), dry_run=True)
        ).status.revision == "r"
        assert await store.get(SandboxTemplate, made.key) == made


class Deleting:
    async def test_a_deleted_object_is_not_found(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        last = await store.delete(SandboxTemplate, made.key)
        assert last.metadata.uid == made.metadata.uid
        assert not await exists(store, SandboxTemplate, made.key)
        assert (await store.list(SandboxTemplate, namespace=ns)).items == ()

    async def test_deleting_a_missing_object_is_not_found(self, store: Store, ns: str):
        with pytest.raises(NotFoundError):
            await store.delete(SandboxTemplate, Key(ns, "a"))

    async def test_an_object_is_removed_with_its_last_finalizer(self, store: Store, ns: str):
        made = await store.create(template(ns, "a", finalizers=("x.dev/one", "x.dev/two")))
        marked = await store.delete(SandboxTemplate, made.key)
        assert marked.is_deleting
        assert await store.get(SandboxTemplate, made.key) == marked

        one_left = await store.update(with_meta(marked, finalizers=("x.dev/two",)))
        assert one_left.is_deleting
        assert await exists(store, SandboxTemplate, made.key)

        await store.update(with_meta(one_left, finalizers=()))
        assert not await exists(store, SandboxTemplate, made.key)

    async def test_a_second_delete_changes_nothing(self, store: Store, ns: str):
        made = await store.create(template(ns, "a", finalizers=("x.dev/one",)))
        first = await store.delete(SandboxTemplate, made.key)
        second = await store.delete(SandboxTemplate, made.key)
        assert second.metadata.deletion_timestamp == first.metadata.deletion_timestamp
        assert await exists(store, SandboxTemplate, made.key)

    async def test_a_deleting_object_accepts_status_but_no_new_finalizer(
        self, store: Store, ns: str
    ):
        made = await store.create(template(ns, "a", finalizers=("x.dev/one",)))
        marked = await store.delete(SandboxTemplate, made.key)
        marked = await store.update_status(with_revision(marked, "ending"))
        assert marked.status.revision == "ending"
        with pytest.raises(InvalidError):
            await store.update(with_meta(marked, finalizers=("x.dev/one", "x.dev/more")))

    async def test_the_name_of_a_deleted_object_can_be_reused(self, store: Store, ns: str):
        first = await store.create(template(ns, "a"))
        await store.delete(SandboxTemplate, first.key)
        second = await store.create(template(ns, "a"))
        assert second.metadata.uid != first.metadata.uid
        assert int(second.metadata.resource_version) > int(first.metadata.resource_version)

    async def test_a_failed_precondition_is_a_conflict(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        new = await store.update(with_image(made, "new"))
        with pytest.raises(ConflictError):
            await store.delete(SandboxTemplate, made.key, uid="another")
        with pytest.raises(ConflictError):
            await store.delete(
                SandboxTemplate, made.key, resource_version=made.metadata.resource_version
            )
        assert await exists(store, SandboxTemplate, made.key)
        await store.delete(
            SandboxTemplate,
            made.key,
            uid=made.metadata.uid,
            resource_version=new.metadata.resource_version,
        )
        assert not await exists(store, SandboxTemplate, made.key)

    async def test_a_dry_run_of_delete_deletes_nothing(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        await store.delete(SandboxTemplate, made.key, dry_run=True)
        assert await store.get(SandboxTemplate, made.key) == made


class CollectingGarbage:
    async def _family(self, store: Store, ns: str, *, blocks: bool = False):
        owner = await store.create(template(ns, "owner"))
        child = await store.create(
            template(ns, "child", owner_references=owned_by(owner, blocks=blocks))
        )
        grandchild = await store.create(
            template(ns, "grandchild", owner_references=owned_by(child, blocks=blocks))
        )
        return owner, child, grandchild

    async def _gone(self, store: Store, *keys: Key) -> None:
        async def all_gone() -> bool:
            return not any([await exists(store, SandboxTemplate, key) for key in keys])

        await eventually(all_gone)

    @pytest.mark.parametrize("propagation", [Propagation.BACKGROUND, Propagation.FOREGROUND])
    async def test_dependents_are_deleted_with_their_owner(
        self, store: Store, ns: str, propagation: Propagation
    ):
        family = await self._family(store, ns, blocks=True)
        bystander = await store.create(template(ns, "bystander"))
        await store.delete(SandboxTemplate, family[0].key, propagation=propagation)
        await self._gone(store, *(member.key for member in family))
        assert await store.get(SandboxTemplate, bystander.key) == bystander

    async def test_background_deletion_removes_the_owner_first(self, store: Store, ns: str):
        owner = await store.create(template(ns, "owner"))
        child = await store.create(
            template(ns, "child", finalizers=("x.dev/hold",), owner_references=owned_by(owner))
        )
        await store.delete(SandboxTemplate, owner.key)
        assert not await exists(store, SandboxTemplate, owner.key)

        async def child_is_ending() -> bool:
            return (await store.get(SandboxTemplate, child.key)).is_deleting

        await eventually(child_is_ending)

    async def test_foreground_deletion_waits_for_blocking_dependents(self, store: Store, ns: str):
        owner = await store.create(template(ns, "owner"))
        child = await store.create(
            template(
                ns,
                "child",
                finalizers=("x.dev/hold",),
                owner_references=owned_by(owner, blocks=True),
            )
        )
        marked = await store.delete(SandboxTemplate, owner.key, propagation=Propagation.FOREGROUND)
        assert marked.is_deleting

        async def child_is_ending() -> bool:
            return (await store.get(SandboxTemplate, child.key)).is_deleting

        await eventually(child_is_ending)
        assert await exists(store, SandboxTemplate, owner.key)
        ending = await store.get(SandboxTemplate, child.key)
        await store.update(with_meta(ending, finalizers=()))
        await self._gone(store, child.key, owner.key)

    async def test_orphan_deletion_keeps_dependents_without_owner_references(
        self, store: Store, ns: str
    ):
        owner, child, grandchild = await self._family(store, ns)
        await store.delete(SandboxTemplate, owner.key, propagation=Propagation.ORPHAN)
        await self._gone(store, owner.key)
        orphan = await store.get(SandboxTemplate, child.key)
        assert orphan.metadata.owner_references == ()
        assert orphan.metadata.uid == child.metadata.uid
        assert await store.get(SandboxTemplate, grandchild.key) == grandchild

    async def test_a_dependent_stays_while_it_has_an_owner(self, store: Store, ns: str):
        one = await store.create(template(ns, "one"))
        two = await store.create(template(ns, "two"))
        child = await store.create(template(ns, "child", owner_references=owned_by(one, two)))
        await store.delete(SandboxTemplate, one.key)

        async def has_no_reference() -> bool:
            now = await store.get(SandboxTemplate, child.key)
            return [item.name for item in now.metadata.owner_references] == ["two"]

        await eventually(has_no_reference)
        await store.delete(SandboxTemplate, two.key)
        await self._gone(store, child.key)

    async def test_owners_are_identified_by_uid(self, store: Store, ns: str):
        first = await store.create(template(ns, "owner"))
        await store.delete(SandboxTemplate, first.key)
        second = await store.create(template(ns, "owner"))
        child = await store.create(template(ns, "child", owner_references=owned_by(first)))
        await self._gone(store, child.key)
        assert await store.get(SandboxTemplate, second.key) == second

    async def test_dependents_of_every_kind_are_collected(self, store: Store, ns: str):
        owner = await store.create(template(ns, "owner"))
        held = await store.create(
            with_meta(lease(ns, "child", "me"), owner_references=owned_by(owner))
        )
        await store.delete(SandboxTemplate, owner.key)

        async def is_gone() -> bool:
            return not await exists(store, Lease, held.key)

        await eventually(is_gone)


class Listing:
    async def test_a_list_is_sorted_by_key(self, store: Store, harness: Harness):
        for ns, name in (
            (harness.other_namespace, "a"),
            (harness.namespace, "c"),
            (harness.namespace, "a"),
            (harness.namespace, "b"),
        ):
            await store.create(template(ns, name))
        listed = await store.list(SandboxTemplate)
        keys = [item.key for item in listed.items if item.key.namespace in _both(harness)]
        assert keys == sorted(keys)
        assert len(keys) == 4

    async def test_a_list_can_be_limited_to_a_namespace(self, store: Store, harness: Harness):
        for ns in _both(harness):
            await store.create(template(ns, "a"))
        listed = await store.list(SandboxTemplate, namespace=harness.namespace)
        assert [item.key for item in listed.items] == [Key(harness.namespace, "a")]

    @pytest.mark.parametrize(
        ("selector", "names"),
        [
            ("app=web", ["a", "b"]),
            ("app!=web", ["c", "d"]),
            ("app=web,tier=db", ["b"]),
            ("tier in (db,cache)", ["b", "c"]),
            ("tier notin (db)", ["a", "c", "d"]),
            ("tier in(db, cache),app notin(web)", ["c"]),
            ("app", ["a", "b", "c"]),
            ("!app", ["d"]),
        ],
    )
    async def test_a_list_can_be_limited_by_labels(
        self, store: Store, ns: str, selector: str, names: list[str]
    ):
        await store.create(template(ns, "a", labels={"app": "web"}))
        await store.create(template(ns, "b", labels={"app": "web", "tier": "db"}))
        await store.create(template(ns, "c", labels={"app": "api", "tier": "cache"}))
        await store.create(template(ns, "d"))
        listed = await store.list(SandboxTemplate, namespace=ns, labels=parse_labels(selector))
        assert [item.metadata.name for item in listed.items] == names

    async def test_a_list_can_be_limited_by_fields(self, store: Store, ns: str):
        for name in "abc":
            await store.create(template(ns, name))
        for selector, names in (("metadata.name=b", ["b"]), ("metadata.name!=b", ["a", "c"])):
            listed = await store.list(SandboxTemplate, namespace=ns, fields=parse_fields(selector))
            assert [item.metadata.name for item in listed.items] == names

    async def test_the_pages_add_up_to_the_list(self, store: Store, ns: str):
        names = [f"n{number:02}" for number in range(10)]
        for name in reversed(names):
            await store.create(template(ns, name))
        seen: list[str] = []
        sizes: list[int] = []
        versions = set[str]()
        token = ""
        while True:
            page = await store.list(SandboxTemplate, namespace=ns, limit=4, continue_token=token)
            seen += [item.metadata.name for item in page.items]
            sizes.append(len(page.items))
            versions.add(page.version)
            if page.remaining is not None:
                assert page.remaining == 10 - len(seen)
            token = page.continue_token
            if not token:
                break
        assert seen == names
        assert sizes == [4, 4, 2]
        assert len(versions) == 1

    async def test_a_full_last_page_has_no_token(self, store: Store, ns: str):
        for name in "abcd":
            await store.create(template(ns, name))
        page = await store.list(SandboxTemplate, namespace=ns, limit=4)
        assert (len(page.items), page.continue_token) == (4, "")

    async def test_all_pages_show_the_version_of_the_first(self, store: Store, ns: str):
        for name in ("a", "b", "c", "d", "e"):
            await store.create(template(ns, name))
        first = await store.list(SandboxTemplate, namespace=ns, limit=2)
        await store.update(with_image(await store.get(SandboxTemplate, Key(ns, "c")), "new"))
        await store.delete(SandboxTemplate, Key(ns, "d"))
        await store.create(template(ns, "cc"))
        await store.create(template(ns, "f"))
        rest = await store.list(
            SandboxTemplate, namespace=ns, limit=10, continue_token=first.continue_token
        )
        assert [item.metadata.name for item in rest.items] == ["c", "d", "e"]
        assert rest.items[0].spec.image == "base"
        assert rest.version == first.version

    async def test_pages_of_a_selection_contain_only_selected_objects(self, store: Store, ns: str):
        for number in range(9):
            await store.create(template(ns, f"n{number}", labels={"odd": str(number % 2)}))
        selector = parse_labels("odd=1")
        first = await store.list(SandboxTemplate, namespace=ns, labels=selector, limit=3)
        rest = await store.list(
            SandboxTemplate,
            namespace=ns,
            labels=selector,
            limit=3,
            continue_token=first.continue_token,
        )
        assert [item.metadata.name for item in first.items] == ["n1", "n3", "n5"]
        assert [item.metadata.name for item in rest.items] == ["n7"]
        assert rest.continue_token == ""

    async def test_an_invalid_continue_token_is_rejected(self, store: Store, ns: str):
        with pytest.raises(InvalidError):
            await store.list(SandboxTemplate, namespace=ns, limit=1, continue_token="nonsense!")


class Watching:
    async def test_a_watch_streams_changes_after_the_version_in_order(self, store: Store, ns: str):
        await store.create(template(ns, "before"))
        since = (await store.list(SandboxTemplate, namespace=ns)).version
        made = await store.create(template(ns, "a"))
        changed = await store.update(with_image(made, "new"))
        stated = await store.update_status(with_revision(changed, "r1"))
        await store.delete(SandboxTemplate, made.key)

        async with aclosing(store.watch(SandboxTemplate, since=since, namespace=ns)) as stream:
            events = await take(stream, 4)

        assert [event.change for event in events] == [
            Change.ADDED,
            Change.MODIFIED,
            Change.MODIFIED,
            Change.DELETED,
        ]
        assert [event.object for event in events[:3]] == [made, changed, stated]
        assert events[3].object.metadata.uid == made.metadata.uid
        assert events[3].object.status == stated.status
        versions = [int(event.version) for event in events]
        assert versions == sorted(set(versions))
        assert all(event.version == event.object.metadata.resource_version for event in events)

    async def test_a_watch_continues_with_new_changes(self, store: Store, ns: str):
        since = (await store.list(SandboxTemplate, namespace=ns)).version
        async with aclosing(store.watch(SandboxTemplate, since=since, namespace=ns)) as stream:
            for name in ("a", "b", "c"):
                waiting = asyncio.ensure_future(take(stream, 1))
                await asyncio.sleep(0)
                made = await store.create(template(ns, name))
                assert (await waiting)[0].object == made

    async def test_a_watch_resumes_from_any_event(self, store: Store, ns: str):
        since = (await store.list(SandboxTemplate, namespace=ns)).version
        for name in ("a", "b", "c"):
            await store.create(template(ns, name))
        async with aclosing(store.watch(SandboxTemplate, since=since, namespace=ns)) as stream:
            first = (await take(stream, 1))[0]
        rest = await changes_since(store, SandboxTemplate, first.version, 2, namespace=ns)
        assert rest == [("ADDED", "b"), ("ADDED", "c")]

    async def test_a_watch_without_a_version_starts_with_the_existing_objects(
        self, store: Store, ns: str
    ):
        present = [await store.create(template(ns, name)) for name in ("a", "b")]
        async with aclosing(store.watch(SandboxTemplate, namespace=ns)) as stream:
            events = await take(stream, 2)
            assert {event.change for event in events} == {Change.ADDED}
            assert sorted((event.object for event in events), key=lambda obj: obj.key) == present
            later = await store.create(template(ns, "c"))
            assert (await take(stream, 1))[0].object == later

    async def test_a_watch_can_be_limited_to_a_namespace(self, store: Store, harness: Harness):
        since = (await store.list(SandboxTemplate)).version
        await store.create(template(harness.other_namespace, "a"))
        await store.create(template(harness.namespace, "b"))
        seen = await changes_since(store, SandboxTemplate, since, 1, namespace=harness.namespace)
        assert seen == [("ADDED", "b")]

    async def test_a_watch_reports_objects_that_start_or_stop_matching(self, store: Store, ns: str):
        since = (await store.list(SandboxTemplate, namespace=ns)).version
        obj = await store.create(template(ns, "a", labels={"app": "other"}))
        obj = await store.update(with_meta(obj, labels={"app": "web"}))
        obj = await store.update(with_meta(obj, labels={"app": "web", "x": "y"}))
        obj = await store.update(with_meta(obj, labels={"app": "other"}))
        await store.update(with_meta(obj, labels={"app": "web"}))
        await store.delete(SandboxTemplate, obj.key)
        seen = await changes_since(
            store, SandboxTemplate, since, 5, namespace=ns, labels=parse_labels("app=web")
        )
        assert [change for change, _ in seen] == [
            "ADDED",
            "MODIFIED",
            "DELETED",
            "ADDED",
            "DELETED",
        ]

    async def test_a_watch_can_be_limited_to_a_name(self, store: Store, ns: str):
        since = (await store.list(SandboxTemplate, namespace=ns)).version
        for name in ("a", "b", "c"):
            await store.create(template(ns, name))
        await store.delete(SandboxTemplate, Key(ns, "b"))
        seen = await changes_since(
            store,
            SandboxTemplate,
            since,
            2,
            namespace=ns,
            fields=parse_fields("metadata.name=b"),
        )
        assert seen == [("ADDED", "b"), ("DELETED", "b")]

    async def test_a_watch_reports_every_step_of_finalization(self, store: Store, ns: str):
        since = (await store.list(SandboxTemplate, namespace=ns)).version
        made = await store.create(template(ns, "a", finalizers=("x.dev/one",)))
        marked = await store.delete(SandboxTemplate, made.key)
        await store.update(with_meta(marked, finalizers=()))
        seen = await changes_since(store, SandboxTemplate, since, 3, namespace=ns)
        assert [change for change, _ in seen] == ["ADDED", "MODIFIED", "DELETED"]

    async def test_all_watchers_get_the_same_events(self, store: Store, ns: str):
        since = (await store.list(SandboxTemplate, namespace=ns)).version

        async def follow() -> list[tuple[str, str]]:
            return await changes_since(store, SandboxTemplate, since, 10, namespace=ns)

        async with asyncio.TaskGroup() as tasks:
            followers = [tasks.create_task(follow()) for _ in range(8)]
            for number in range(10):
                await store.create(template(ns, f"n{number}"))
        expected = [("ADDED", f"n{number}") for number in range(10)]
        assert all(task.result() == expected for task in followers)

    async def test_a_watch_does_not_report_other_kinds(self, store: Store, ns: str):
        since = (await store.list(SandboxTemplate, namespace=ns)).version
        await store.create(lease(ns, "a", "me"))
        await store.create(template(ns, "b"))
        seen = await changes_since(store, SandboxTemplate, since, 1, namespace=ns)
        assert seen == [("ADDED", "b")]


class Versions:
    async def test_versions_are_one_sequence_over_all_kinds(self, store: Store, ns: str):
        versions: list[int] = []
        for number in range(3):
            versions.append(_version(await store.create(template(ns, f"t{number}"))))
            versions.append(_version(await store.create(lease(ns, f"l{number}", "me"))))
        obj = await store.get(SandboxTemplate, Key(ns, "t0"))
        versions.append(_version(await store.update(with_image(obj, "new"))))
        await store.delete(SandboxTemplate, Key(ns, "t1"))
        versions.append(int((await store.list(SandboxTemplate, namespace=ns)).version))
        assert versions == sorted(set(versions))

    async def test_a_list_is_not_older_than_the_last_write(self, store: Store, ns: str):
        made = await store.create(template(ns, "a"))
        listed = await store.list(SandboxTemplate, namespace=ns)
        assert int(listed.version) >= _version(made)


def _version(obj: object) -> int:
    return int(obj.metadata.resource_version)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]


def _both(harness: Harness) -> tuple[str, str]:
    return harness.namespace, harness.other_namespace
