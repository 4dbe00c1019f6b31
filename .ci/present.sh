# shellcheck shell=bash
# What is present on this machine; for install and run, in the repository's folder.

has() { command -v "$1" >/dev/null 2>&1; }
sandbox_works() { python3 -c 'from book.grading import sandbox; sandbox.probe()' >/dev/null 2>&1; }
has_browser() {
  local name  # as in tests/browser.py
  for name in "${LOCKSTEP_BROWSER:-chromium}" chromium chromium-browser google-chrome google-chrome-stable chrome; do
    if has "$name"; then return 0; fi
  done
  return 1
}
