"""What code of processes begins with that need the native library alone: importing torch would take them seconds."""

WITHOUT_TORCH = """
import sys, types
import kvasir
ops = sys.modules["kvasir.ops"] = types.ModuleType("kvasir.ops")
ops.__path__ = [kvasir.__path__[0] + "/ops"]
"""
