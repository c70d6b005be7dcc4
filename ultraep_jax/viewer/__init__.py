"""A trace as a page: distribution, timeline, single microbatches, comparison of runs.

The page is one file without links to elsewhere, so it can be mailed or attached to a report. The
charts are drawn by Plotly, whose Python package carries the script (extra ``viewer``).
"""

from ultraep_jax.viewer.page import error_page as error_page
from ultraep_jax.viewer.page import render as render
from ultraep_jax.viewer.server import make_server as make_server
