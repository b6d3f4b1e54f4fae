"""What a request occupies until its response is sent and its work in the background has ended."""

from __future__ import annotations

import asyncio


class Held:
    """Something that an HTTP request occupies until all its holders have left. The request is the first holder."""

    _holders = 1

    def hold(self, work: asyncio.Task) -> None:
        """Adds `work`, which continues after the response, as a holder until it ends."""
        self._holders += 1
        work.add_done_callback(lambda _: self.leave())

    def leave(self) -> None:
        """Ends one holder; the last one releases what is held."""
        self._holders -= 1
        if not self._holders:
            self._release()

    def _release(self) -> None:
        raise NotImplementedError
