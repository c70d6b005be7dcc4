"""Serving the page, made anew from the trace at each load."""

import http.server
import ipaddress
import socket
from collections.abc import Callable

Page = Callable[[], str]


def make_server(page: Page, host: str = "127.0.0.1", port: int = 0) -> http.server.HTTPServer:
  """A server with this page at ``/`` and nothing else; call ``serve_forever``.

  Args:
    page: makes the HTML; it may not raise.
    host: to listen on. On a loopback address, requests that name another host are refused, so
      that no page of the web can read the trace through the browser.
    port: 0 takes a free one; it is in ``server_port``.

  Raises:
    OSError: the address cannot be listened on.
  """
  local = _is_loopback(host)

  class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
      if local and not _is_loopback(self.headers.get("Host", "")):
        self._answer(403, "text/plain", "the viewer answers to this machine only")
      elif self.path.partition("?")[0] not in ("/", "/index.html"):
        self._answer(404, "text/plain", "the viewer is at /")
      else:
        self._answer(200, "text/html", page())

    def _answer(self, status: int, kind: str, text: str) -> None:
      content = text.encode()
      self.send_response(status)
      self.send_header("Content-Type", f"{kind}; charset=utf-8")
      self.send_header("Content-Length", str(len(content)))
      self.send_header("Cache-Control", "no-store")
      self.send_header("X-Content-Type-Options", "nosniff")
      self.end_headers()
      self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
      """Says nothing: the page is all there is."""

  class Server(http.server.ThreadingHTTPServer):
    """Of IPv4, or of IPv6 for such an address."""

    address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

  return Server((host, port), Handler)


def _is_loopback(host: str) -> bool:
  """Whether an address, or the value of a Host header, is this machine's own."""
  name = host.rpartition(":")[0] if host.count(":") == 1 or "]:" in host else host
  name = name.strip("[]")
  if name == "localhost":
    return True
  try:
    return ipaddress.ip_address(name).is_loopback
  except ValueError:
    return False
