"""The version, where the build and the program both find it."""

VERSION = "0.1.0"
