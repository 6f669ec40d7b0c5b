"""The rescheduler: empties nodes that hold few long tasks, by checkpoint and migrate."""
