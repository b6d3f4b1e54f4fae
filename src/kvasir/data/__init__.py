"""Maps data through models: rows of a Ray dataset or of any iterable, with checkpoints.

for row in kvasir.data.map([{"prompt": "Hello"}], model="kvasir-mini", column="prompt"):
    print(row["generated_text"])
"""

from kvasir.data.dataset import map
from kvasir.data.mapper import Mapper

__all__ = ["Mapper", "map"]
