"""OpenCV, kept quiet: what a broken file makes its decoders print says less than our own errors."""

from __future__ import annotations

import os

os.environ.setdefault("OPENCV_FFMPEG_LOGLEVEL", "-8")
os.environ.setdefault("OPENCV_LOG_LEVEL", "SILENT")

import cv2

__all__ = ["cv2"]
