"""Evaluation without a cluster: what balancing reaches for a model, its routing and a machine."""

from ultraep_jax.devices.device import Device as Device
from ultraep_jax.simulate.cost import Setting as Setting
from ultraep_jax.simulate.layouts import Layout as Layout
from ultraep_jax.simulate.layouts import compare_layouts as compare_layouts
from ultraep_jax.simulate.models import MODELS as MODELS
from ultraep_jax.simulate.models import ModelShape as ModelShape
from ultraep_jax.simulate.replay import recorded_shape as recorded_shape
from ultraep_jax.simulate.replay import replay as replay
from ultraep_jax.simulate.replay import trace_loads as trace_loads
from ultraep_jax.simulate.replay import trace_setting as trace_setting
from ultraep_jax.simulate.run import Outcome as Outcome
from ultraep_jax.simulate.run import share_of_ideal as share_of_ideal
from ultraep_jax.simulate.run import simulate as simulate
from ultraep_jax.simulate.traffic import TRAFFIC as TRAFFIC
from ultraep_jax.simulate.traffic import Traffic as Traffic
from ultraep_jax.simulate.traffic import generate_loads as generate_loads
from ultraep_jax.simulate.traffic import generate_totals as generate_totals
