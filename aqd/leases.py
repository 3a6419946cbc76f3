"""The leases of all that a node holds: what is asked for at each renewal, and what becomes of the answer.

Run by the dispatcher's main thread. An answer says which leases are extended, which jobs were cancelled meanwhile, and
by what it leaves out which are lost: those are fenced if they were begun, and forgotten if not.
"""

from collections.abc import Callable, Mapping

from aqd import log, messages
from aqd.channel import Peer
from aqd.config import Config
from aqd.links import Held, Link, Pair
from aqd.recorder import Recorder, Renewal, Renewed
from aqd.stock import Stock

logger = log.get_logger("dispatcher")


class Leases:
    """``recall(link)`` takes back what a worker has not begun, ``release(held, reason)`` gives a job back."""

    def __init__(
        self,
        config: Config,
        links: Mapping[int, Link],
        stock: Stock,
        recorder: Recorder,
        master: Peer,
        recall: Callable[[Link], None],
        release: Callable[[Held, str], None],
    ) -> None:
        self._lease_ns = int(config.daemon.lease_s * 1e9)
        self._links, self._stock, self._recorder, self._master = links, stock, recorder, master
        self._recall, self._release = recall, release

    def pairs(self) -> list[Pair]:
        """All that is held."""
        pairs = [(held.id, held.token) for held in self._stock]
        for link in self._links.values():
            pairs += [(held.id, held.token) for held in link.held.values()]
        return pairs

    def renew(self) -> None:
        """Ask for the leases of all that is held; the answer also says what was cancelled."""
        if (pairs := self.pairs()) and not self._recorder.renewal_waits:
            self._recorder.renewal_waits = True
            notes = [note for link in self._links.values() if (note := link.new_note()) is not None]
            self._recorder.put(Renewal(pairs, notes))

    def renewed(self, answer: Renewed) -> None:
        """Take over the answer."""
        certain_ns = answer.asked_ns + self._lease_ns
        for link in self._links.values():
            for number in link.renewed(answer.asked, answer.kept, certain_ns):
                self._lost(link, number)
            for number in link.cancelled(answer.kept):
                # The master ends it, should it be running by then; what is not begun comes back.
                self._master.send(messages.Cancel(link.incarnation, number))
                if link.page.current() != number:
                    self._recall(link)
            link.noted = max(link.noted, answer.notes.get(link.incarnation, 0))
        for held in list(self._stock):
            lease = answer.kept.get((held.id, held.token))
            if lease is None:
                if (held.id, held.token) in answer.asked:
                    logger.warning("lease lost before the start", **held.named())
                    self._stock.remove(held)
            elif lease.cancelled:
                self._stock.remove(held)
                self._release(held, "cancelled")
            elif lease.extended:
                held.certain_ns = certain_ns

    def _lost(self, link: Link, number: int) -> None:
        """Another owner has this job. One whose outcome is on its way to be recorded is looked up there."""
        if link.unrecorded(number) or link.exited is not None:
            return
        held = link.held[number]
        logger.warning("lease lost", **held.named(link.slot))
        self._master.send(messages.Fence(link.incarnation, number))
        if link.page.current() != number:
            self._recall(link)
