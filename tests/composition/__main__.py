"""`make composition`: runs every cell and writes the page; writes nothing where one fails, or only some are run."""

from __future__ import annotations

import argparse
import sys
import time
from multiprocessing import get_context

from kvasir.environment import prepare_torch
from tests.composition import page
from tests.composition.cells import Verdict
from tests.composition.features import NAMED
from tests.composition.sets import COUNT, SEED, pairs, real, some
from tests.composition.work import parts, run_part

WORKERS = 2


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.composition", description=__doc__)
    parser.add_argument("feature", nargs="*", help="run only cells that have one of these")
    only = set(parser.parse_args().feature)
    if unknown := only - set(NAMED):
        parser.error(f"no such feature: {', '.join(sorted(unknown))}")
    prepare_torch()
    print(f"random sets: {COUNT} from seed {SEED}", flush=True)
    begun, verdicts, failed = time.perf_counter(), {}, 0
    todo = parts([cell for cell in (*pairs(), *real(), *some()) if not only or only & cell.names])
    with get_context("spawn").Pool(WORKERS) as pool:
        for done, results in enumerate(pool.imap_unordered(run_part, todo), 1):
            for name, result in results:
                if isinstance(result, Verdict):
                    verdicts[name] = result
                else:
                    failed += 1
                    print(f"\nFAILED  {name}\n{result}", flush=True)
            print(f"\r{len(verdicts)} cells, {done} of {len(todo)} parts", end="", file=sys.stderr, flush=True)
        pool.close()  # whose processes remove their folders at their ends
        pool.join()
    print(f"\n{len(verdicts)} cells as they should be, {failed} failed, {time.perf_counter() - begun:.0f} s")
    if not failed and not only:
        page.PATH.write_text(page.render(verdicts))
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
