"""Marks on environments' methods."""

from __future__ import annotations

from unittest.mock import MagicMock

from verifiers.envs.lifecycle import cleanup, marked_methods, stop, teardown


class Base:
    @stop
    def b_bare(self, state: dict) -> bool:
        return False

    @stop(priority=5)
    async def z_first(self, state: dict) -> bool:
        return True

    @stop
    def a_bare(self, state: dict) -> bool:
        return False

    @cleanup(priority=-1)
    @teardown
    def twice(self) -> str:
        return "tidied"

    @property
    def explodes(self) -> None:
        raise RuntimeError("reading marks must not run properties")

    @staticmethod
    @teardown(priority=-2)
    def of_no_instance() -> None: ...

    @classmethod
    @cleanup(priority=-2)
    def of_the_class(cls, state: dict) -> None: ...


class Child(Base):
    def a_bare(self, state: dict) -> bool:
        return True


def names(obj: object, kind: str) -> list[str]:
    return [method.__name__ for method in marked_methods(obj, kind)]


def test_higher_priority_comes_first_then_the_name() -> None:
    assert names(Base(), "stop") == ["z_first", "a_bare", "b_bare"]


def test_static_and_class_methods_can_be_marked() -> None:
    assert names(Base(), "teardown") == ["twice", "of_no_instance"]
    assert names(Base(), "cleanup") == ["twice", "of_the_class"]


def test_an_override_without_the_mark_is_not_marked() -> None:
    assert names(Child(), "stop") == ["z_first", "b_bare"]


def test_functions_put_on_an_instance_count_and_mocks_do_not() -> None:
    obj = Base()

    @stop(priority=9)
    def own(state: dict) -> bool:
        return True

    obj.own, obj.mock = own, MagicMock()  # type: ignore[attr-defined]
    assert names(obj, "stop")[0] == "own"
    assert len(names(obj, "stop")) == 4
    assert names(Base(), "stop")[0] == "z_first"
