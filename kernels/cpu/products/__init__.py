"""Products by other means than a library's: panels of few rows, depthwise; and their forms."""
