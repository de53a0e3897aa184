"""Segmentation of real images: slices of a template head, with its grey matter as the mask. It claims nothing.

`pip install nilearn`, whose wheel has the template (MNI ICBM 152, a mean of 152 heads), then `python -m
examples.brain_slices`. It is one head, cut at three sites with cameras of their own, so no score here says anything about
patients: a device's test slices lie between its training slices.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import attune

SITES, STEP_MM = 3, 4


def slices() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Return the axial slices with some grey matter, (N, H, W), from 0 to 1, and 1 where it is more than half, else 0."""
    from nilearn.datasets import load_mni152_gm_template, load_mni152_template

    head = np.moveaxis(load_mni152_template(resolution=STEP_MM).get_fdata(), 2, 0)
    grey = np.moveaxis(load_mni152_gm_template(resolution=STEP_MM).get_fdata(), 2, 0) > 0.5
    shown = grey.sum(axis=(1, 2)) > 20
    return (head[shown] / head.max()).astype(np.float32), grey[shown].astype(np.int64)


def main() -> None:
    """Train a U-Net at all sites, and print what each of them keeps, against the same network alone."""
    x, y = slices()
    draw, sites = np.random.default_rng(0), {}
    for site in range(SITES):
        seen = (0.5 + 0.5 * draw.random()) * x + 0.2 * draw.random() + 0.05 * draw.standard_normal(x.shape)
        trained, tested = np.arange(site, len(x), 4), np.arange(3, len(x), 4)
        sites[f"camera{site}"] = (
            seen[trained, :, :, None].astype(np.float32),
            y[trained],
            seen[tested, :, :, None].astype(np.float32),
            y[tested],
        )
    settings = {"train.batch_size": 4, "train.lr": 0.1, "train.loss": "dice"}
    print(attune.simulate(sites, "fedper", rounds=10, settings=settings, baseline="alone").table())


if __name__ == "__main__":
    main()
