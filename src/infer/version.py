"""The version of the package, read by the build and by the program."""

VERSION = "0.1.0"
