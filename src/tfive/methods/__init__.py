"""Methods: what each declares (`MethodSpec`), and `register` for one of your own."""

from tfive.methods.registry import methods, register
from tfive.methods.spec import MethodSpec

__all__ = ["MethodSpec", "methods", "register"]
