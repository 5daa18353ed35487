"""Logins: users, authenticators and authorizers, for applications in Lua and Python (spec: bas-api §5).

    from smqrt.http.logins import Acl, Authenticator, UserTable

    users = UserTable({"ann": {"pwd": "secret", "roles": ["admin"]}, "bob": "hunter2"})
    dir.setauth(Authenticator(users, "form"), Acl(users, {"all": {"urls": ["/*"], "roles": ["admin"]}}))

A request's user is `request.user()`; `request.login()` and `request.logout()` begin and end a login by program.
"""

from smqrt.http.logins.authenticator import (
    Acl,
    Authenticator,
    AuthInfo,
    Authorizer,
    FunctionAuthorizer,
    LoginGuard,
    LoginPage,
)
from smqrt.http.logins.credentials import Account, Answered, FunctionUsers, ServerUsers, Users, UserTable, server_users
from smqrt.http.logins.registry import Login, Logins

__all__ = [
    "Account",
    "Acl",
    "Answered",
    "AuthInfo",
    "Authenticator",
    "Authorizer",
    "FunctionAuthorizer",
    "FunctionUsers",
    "LoginGuard",
    "Login",
    "LoginPage",
    "Logins",
    "ServerUsers",
    "UserTable",
    "Users",
    "server_users",
]
