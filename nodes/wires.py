"""The pack's own types on the wire."""

from __future__ import annotations

from comfy_api.latest import io

CATEGORY = "training/demotion"

TrainingSet = io.Custom("DEMOTION_TRAINING_SET")
Measurement = io.Custom("DEMOTION_MEASUREMENT")
GapMap = io.Custom("DEMOTION_GAP_MAP")
Gate = io.Custom("DEMOTION_GATE")
