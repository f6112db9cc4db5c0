"""What configs of panel kernels share: a TMA producer warp fills a ring of tiles that consumer warps read."""

from __future__ import annotations


class RingConfig:
    """Mixin of kernel configs with a ring of tiles (``device/pipeline.cuh``).

    Attributes
    ----------
    tile : int
        Rows per tile.
    stages : int
        Tiles in the ring.
    tile_window : int
        Consecutive tiles that a group or step reads.
    warps : int
        Consumer warps per CTA; one more warp is the producer.
    rows_per_warp : int
        Vector rows whose accumulators a warp holds.
    cluster : int
        CTAs that share their tiles by multicast.
    """

    tile: int
    stages: int
    tile_window: int
    warps: int
    rows_per_warp: int
    cluster: int

    @property
    def threads(self) -> int:
        """Threads per CTA, those of the producer warp included."""
        return 32 * (self.warps + 1)

    @property
    def ring(self) -> int:
        """Rows of all stages."""
        return self.tile * self.stages

    @property
    def block_rows(self) -> int:
        """Vector rows per cluster."""
        return self.warps * self.rows_per_warp * self.cluster

    def _ring_constants(self) -> dict[str, object]:
        """Constants of the ring in the C++ config."""
        return {
            "kTile": self.tile,
            "kStages": self.stages,
            "kTileWindow": self.tile_window,
            "kWarps": self.warps,
            "kRowsPerWarp": self.rows_per_warp,
            "kCluster": self.cluster,
        }
