from paddock.kit import bearer


def test_a_token_is_read_from_the_header_whatever_the_case_of_the_scheme() -> None:
    assert bearer.token_of("Bearer secret") == "secret"
    assert bearer.token_of("bearer  secret ") == "secret"
    assert bearer.token_of(bearer.header("secret")["Authorization"]) == "secret"


def test_another_scheme_or_no_header_carries_no_token() -> None:
    assert bearer.token_of("") is None
    assert bearer.token_of("Basic secret") is None
    assert bearer.token_of("Bearersecret") is None


def test_only_known_tokens_are_authorized() -> None:
    assert bearer.is_authorized("Bearer two", "one", "two")
    assert not bearer.is_authorized("Bearer three", "one", "two")
    assert not bearer.is_authorized("two", "one", "two")
    assert not bearer.is_authorized("Bearer two")


def test_an_empty_token_never_matches() -> None:
    assert not bearer.is_authorized("Bearer ", "")
    assert not bearer.is_authorized("", "")


def test_bytes_that_are_not_text_are_compared_without_an_error() -> None:
    assert not bearer.is_authorized("Bearer \udcff\xe9", "secret")
