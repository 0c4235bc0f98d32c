"""Registry credentials of builds."""

from paddock.builds.credentials import BuildCredentials, RegistryLogin


def test_credentials_are_kept_until_they_are_removed() -> None:
    credentials = BuildCredentials()
    login = RegistryLogin(username="ana", password="secret")
    credentials.put("b1", login)
    assert credentials.get("b1") == login
    credentials.remove("b1")
    assert credentials.get("b1") is None


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(RegistryLogin(username="ana", password="secret"))
