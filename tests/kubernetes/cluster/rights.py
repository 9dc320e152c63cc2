"""Service accounts: their tokens, and what their roles allow."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field

from tests.kubernetes.cluster.failures import Refused
from tests.kubernetes.cluster.store import Object, Store

Account = tuple[str, str]
"""Namespace and name."""


@dataclass
class Rights:
    """Who asks, and whether they may.

    Attributes:
        administrator: the token of whoever may do everything.
    """

    store: Store
    administrator: str = field(default_factory=lambda: uuid.uuid4().hex)
    _accounts: dict[str, Account] = field(default_factory=dict)
    _tokens: dict[Account, str] = field(default_factory=dict)

    def token(self, namespace: str, name: str) -> str:
        """The token of a service account."""
        account = (namespace, name)
        if account not in self._tokens:
            self._tokens[account] = uuid.uuid4().hex
            self._accounts[self._tokens[account]] = account
        return self._tokens[account]

    def check(self, token: str, verb: str, group: str, resource: str, namespace: str, name: str) -> None:
        """Refuses what the owner of a token may not do.

        Args:
            resource: plural of the kind, with the part asked for: ``pods/log``.
        """
        if token == self.administrator:
            return
        account = self._accounts.get(token)
        if account is None:
            raise Refused(401, "Unauthorized", "Unauthorized")
        for rule in self._rules(account, namespace):
            if (
                _has(rule["verbs"], verb)
                and _has(rule.get("apiGroups") or [""], group)
                and _has(rule.get("resources") or [], resource)
                and (not rule.get("resourceNames") or name in rule["resourceNames"])
            ):
                return
        who = f"system:serviceaccount:{account[0]}:{account[1]}"
        raise Refused(
            403,
            "Forbidden",
            f'{resource} "{name}" is forbidden: User "{who}" cannot {verb} resource "{resource}" in API group '
            f'"{group}" in the namespace "{namespace}"',
        )

    def _rules(self, account: Account, namespace: str) -> list[Object]:
        bindings = self.store.list("ClusterRoleBinding")
        if namespace:
            bindings += self.store.list("RoleBinding", namespace)
        rules: list[Object] = []
        for binding in bindings:
            where = binding["metadata"].get("namespace", "")
            if any(_is(subject, account, where) for subject in binding.get("subjects") or ()):
                reference = binding["roleRef"]
                role = self.store.get(
                    reference["kind"], where if reference["kind"] == "Role" else "", reference["name"]
                )
                rules += (role or {}).get("rules") or []
        return rules


def _is(subject: Object, account: Account, namespace: str) -> bool:
    named = (subject.get("namespace", namespace), subject.get("name"))
    return subject.get("kind") == "ServiceAccount" and named == account


def _has(allowed: list[str], wanted: str) -> bool:
    return wanted in allowed or "*" in allowed
