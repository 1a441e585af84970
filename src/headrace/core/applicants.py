"""What a request brings before admission: the accounts it falls under, its size as far as it is known, what it asks of the
queue. Put together from the directory, the settings and what is known of the model.
"""

from headrace.admission.applicant import Applicant
from headrace.core.accounts import CallerAccounts
from headrace.core.demands import demand_of
from headrace.core.directory import Directory
from headrace.core.served_model import ServedModel
from headrace.ledger.records import Reservation


class Applicants:
    """Makes applicants. Belongs to the core."""

    def __init__(self, accounts: CallerAccounts, directory: Directory, *, default_max_tokens: int) -> None:
        self._accounts = accounts
        self._directory = directory
        self._default_max_tokens = default_max_tokens

    def of(
        self,
        model: ServedModel,
        reservation: Reservation,
        *,
        max_tokens: int | None,
        priority: int,
        is_exact: bool,
        is_final: bool,
        may_be_shortened: bool,
        now_us: int,
    ) -> Applicant:
        """`max_tokens` and `priority` are what the client asked for; for the rest see `Applicant`."""
        accounts = self._accounts.of(
            tenant_id=reservation.tenant_id,
            api_key_id=reservation.api_key_id,
            user_id=reservation.user_id,
            model_id=model.model_id,
        )
        is_throttled = self._accounts.is_throttled(accounts, now_us)
        sharing = self._directory.sharing_of(reservation.tenant_id)
        demand = demand_of(
            model,
            reservation,
            sharing,
            accounts,
            maximum=self._default_max_tokens if max_tokens is None else max_tokens,
            priority=priority,
            is_exact=is_exact,
            is_throttled=is_throttled,
        )
        return Applicant(
            request_id=reservation.request_id,
            tenant_id=reservation.tenant_id,
            model_id=model.model_id,
            accounts=accounts,
            prompt_tokens=reservation.prompt_tokens_estimated,
            max_tokens=max_tokens,
            default_max_tokens=self._default_max_tokens,
            context_tokens=model.context_tokens,
            is_stream=reservation.mode == "stream",
            is_exact=is_exact,
            can_be_counted=model.can_count,
            is_final=is_final,
            may_be_shortened=may_be_shortened,
            demand=demand,
            is_dedicated=sharing.isolation == "dedicated",
            memory_rate=model.memory_rate,
            output_tokens=model.expectations.longest_output(reservation.tenant_id),
            is_throttled=is_throttled,
        )
