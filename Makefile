# Lockstep. `make` alone lists the targets.
#
# Everything lives in .venv and _build; nothing is installed outside this folder. PYTHON, PORT and JOBS (tests side by side) may be set:
#   make book PYTHON=/usr/bin/python3.12 PORT=9000
# WHOLE=1 makes `make graded` grade whole labs, not just one random exercise of each with those that it needs.
# SINCE=REVISION: what `make quick` and `make changed` compare with. SEED=N: the seed of `make sample`.
# SHARD=2/6: which part of `make test-all` to run.
# FRESH=1 has `make test-all` start each notebook's kernel as JupyterLab does, instead of forking it from one that has loaded torch.
# COSTS=1 has it record in tests/costs.json how long each test took; use an otherwise idle machine.
# SOLUTIONS=0 builds the website without the labs' solutions, into a separate folder, free of older pages.

PYTHON ?= python3
PORT   ?= 8000
# Tests sometimes wait for ranks or pages, so run one more process than there are cores.
JOBS   ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$(( cores < 5 ? cores + 1 : 6 )))
BIN    := .venv/bin
# With this set, as in many container images, each of about a hundred processes would recompile the book.
unexport PYTHONDONTWRITEBYTECODE

SOLUTIONS ?= 1
SITE      := $(if $(filter 0,$(SOLUTIONS)),_build/without_solutions/)
HTML      := $(SITE)_build/html

# A step runs again only if its stamp is older than a file that it depends on; otherwise it costs nothing.
BOOK_STAMP  := .venv/.requirements-book
ALL_STAMP   := .venv/.requirements-all
MORE_STAMP  := .venv/.requirements-frameworks
CHECK_STAMP := .venv/.requirements-check
SITE_STAMP  := $(SITE)_build/.site

SITE_SOURCES := _config.yml _toc.yml $(wildcard *.md *.bib chapters/*.md chapters/*.ipynb labs/*.ipynb) \
                book/widgets/registry.py book/grading/lab.py book/grading/lab_schema.py book/grading/release.py \
                $(wildcard book/authoring/*.py book/authoring/*.css book/twin/*.js book/widgets/*.js book/widgets/*.css)
AS_ROOT      := $(if $(filter 0,$(shell id -u)),--allow-root)

SINCE ?= HEAD
SEED  ?= 0
SHARD ?= 1/1
POINTS ?= 2
TIMES ?= 100
# pytest exits with 5 if it has nothing to run.
NONE_IS_FINE := || test $$? = 5
# tests/tiers.py puts the longest modules first; xdist would go by the number of tests.
PYTEST    := $(BIN)/python -m pytest -rfEs --dist loadscope --no-loadscope-reorder
NOTEBOOKS := chapters labs --nbval

.PHONY: help book site check quick test test-all changed sample answers browser attack graded mutants stress busy lint lab new-lab new-exercise gpu bench hangs picture clean
.DEFAULT_GOAL := help

help:
	@echo "make book      read the book: build the website and serve it on this machine (no torch needed)"
	@echo "make lab       do the labs: open student copies in JupyterLab"
	@echo "make check     what ruff and mypy find in the code (seconds, no torch needed)"
	@echo "make quick     check a change: the cheap tests, and the tests nearest to what you have edited (a minute)"
	@echo "make test      check it: package, website, browser, and every notebook run again with nbval (11 minutes)"
	@echo "make test-all  check everything: all answers, attacks, grading, every page in every view (COSTS=1: keep how long each test took)"
	@echo "make changed   what test-all adds to test for the files that differ from SINCE"
	@echo "make sample    a tenth of what test-all adds to test, drawn by SEED"
	@echo "make answers   right and wrong answers to the labs, all of them"
	@echo "make browser   everything that needs a browser or the website"
	@echo "make attack    submissions that cheat or do harm, graded in a sandbox (Linux, bubblewrap)"
	@echo "make graded    every lab's solutions graded in the sandbox (Linux, bubblewrap)"
	@echo "make mutants   check the tests: faults put into the package on purpose, and which target finds them"
	@echo "make stress    kill, restart, interrupt kernels with running ranks (TIMES=100 each); count leftovers (Linux)"
	@echo "make busy      run every lab's solutions beside busy loops (TIMES=10 each), and count wrong verdicts"
	@echo "make lint      only the rules for notebooks (seconds)"
	@echo "make new-lab NAME=11_name                      write a lab without exercises, in labs/"
	@echo "make new-exercise LAB=11_name NAME=function    add an exercise to it (POINTS=2, DEPENDS='1 2')"
	@echo "make site      only build the website, into $(HTML) (SOLUTIONS=0: without the labs' solutions)"
	@echo "make gpu       on a machine with GPUs: labs, chapters and measurements on NCCL, and a report"
	@echo "make bench     measure launching, the ring, the simulator, the pages and grading here, and write the page of measurements"
	@echo "make hangs     run the programs of examples/hangs.py, and write the page When it hangs"
	@echo "make picture   draw the README's picture again, from what chapter 3 stores"
	@echo "make clean     remove what was built (the environment and your lab answers stay)"

book: $(SITE_STAMP)
	@$(BIN)/python -m book.authoring serve $(HTML) --port $(PORT)

site: $(SITE_STAMP)
	@echo "The website is in $(HTML); open $(HTML)/index.html or run 'make book'."

check: $(CHECK_STAMP)
	@$(BIN)/ruff check
	@$(BIN)/mypy

quick: $(MORE_STAMP)
	@$(PYTEST) tests $(NOTEBOOKS) --tier quick --add-affected $(SINCE) --budget 45 -q -n $(JOBS)

test: $(MORE_STAMP)
	@echo "== Testing: the package, the website in a browser, then every notebook (11 minutes)"
	@$(PYTEST) tests $(NOTEBOOKS) --tier test -n $(JOBS)

test-all: $(MORE_STAMP)
	@echo "== Testing everything (SHARD=$(SHARD))"
	@$(PYTEST) tests $(NOTEBOOKS) --tier all $(if $(FRESH),--fresh-kernels) $(if $(COSTS),--write-costs) --shard $(SHARD) -n $(JOBS)

changed: $(MORE_STAMP)
	@echo "== Testing what the changes since $(SINCE) affect, and test leaves out"
	@$(PYTEST) tests $(NOTEBOOKS) --tier test --add-affected $(SINCE) --budget 900 --added-only -n $(JOBS) $(NONE_IS_FINE)

sample: $(MORE_STAMP)
	@echo "== Testing a tenth of what test leaves out (SEED=$(SEED))"
	@$(PYTEST) tests $(NOTEBOOKS) --tier test --add-drawn 0.1 --seed $(SEED) --added-only -n $(JOBS)

answers: $(ALL_STAMP)
	@echo "== Testing: right and wrong answers to the labs (a quarter of an hour)"
	@$(PYTEST) tests/test_answers.py -n $(JOBS) --dist load

browser: $(ALL_STAMP)
	@echo "== Testing: everything in a browser"
	@$(PYTEST) tests --tier pages -n $(JOBS)

attack: $(ALL_STAMP)
	@echo "== Testing: submissions that attack the grader (a quarter of an hour)"
	@$(PYTEST) tests/test_attack*.py -n $(JOBS)

graded: $(ALL_STAMP)
	@echo "== Testing: every lab's solutions, graded in the sandbox (some minutes)"
	@$(if $(WHOLE),LOCKSTEP_WHOLE=1) $(PYTEST) tests/test_grading_labs.py -n $(JOBS)

mutants: $(MORE_STAMP)
	@$(BIN)/python -m tests.mutants

stress: $(ALL_STAMP)
	@$(BIN)/python -m tests.stress $(TIMES)

busy: TIMES = 10
busy: $(ALL_STAMP)
	@$(BIN)/python -m tests.busy $(TIMES)

gpu: $(MORE_STAMP)
	@$(BIN)/python -m benchmarks.gpu

lint: $(ALL_STAMP)
	@$(BIN)/python -m book.authoring normalise --check chapters labs
	@$(BIN)/python -m book.authoring lint chapters labs

new-lab: $(ALL_STAMP)
	@$(BIN)/python -m book.authoring new-lab "$(NAME)"

new-exercise: $(ALL_STAMP)
	@$(BIN)/python -m book.authoring new-exercise "$(LAB)" "$(NAME)" --points "$(POINTS)" --depends $(DEPENDS)

lab: $(ALL_STAMP)
	@$(BIN)/python -m book.grading release labs -o student
	@echo "== Opening JupyterLab on student/ (no browser? copy the address below; Ctrl-C twice ends it)"
	@JUPYTER_CONFIG_PATH=book/authoring/jupyter $(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --notebook-dir=. --LabApp.default_url=/lab/tree/student --log-level=WARN $(AS_ROOT)

bench: $(MORE_STAMP) $(SITE_STAMP)
	@$(BIN)/python -m benchmarks --keep

hangs: $(BOOK_STAMP)
	@$(BIN)/python examples/hangs.py --page

picture: $(BOOK_STAMP)
	@$(BIN)/python -m book.authoring picture

clean:
	rm -rf _build .hypothesis
	find book tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@echo "== Making the environment .venv with $$($(PYTHON) --version 2>&1)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "Lockstep needs Python 3.10 or later. Name one: make PYTHON=/path/to/python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "Python could not make an environment. On Debian or Ubuntu: sudo apt install python3-venv"; exit 1; }

$(BOOK_STAMP): requirements-book.txt constraints.txt | $(BIN)/python
	@echo "== Installing what the website needs (about a minute the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-book.txt
	@touch $@

$(ALL_STAMP): requirements.txt requirements-book.txt constraints.txt pyproject.toml | $(BIN)/python
	@echo "== Installing everything, torch included (some minutes the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $(BOOK_STAMP) $@

$(MORE_STAMP): requirements-frameworks.txt $(ALL_STAMP)
	@echo "== Installing the frameworks that chapter 10 runs"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-frameworks.txt
	@touch $@

$(CHECK_STAMP): requirements-check.txt constraints.txt | $(BIN)/python
	@echo "== Installing what checks the code (seconds)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements-check.txt
	@touch $@

$(SITE_STAMP): $(BOOK_STAMP) $(SITE_SOURCES)
	@echo "== Building the website from the stored notebooks"
	@SOLUTIONS=$(SOLUTIONS) $(BIN)/jupyter-book build . --path-output ./$(SITE) --quiet -W -n --keep-going >/dev/null
	@touch $@
