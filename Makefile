# Lockstep. `make` alone lists the targets.
#
# Everything lives in .venv and _build; nothing is installed outside this folder. PYTHON, PORT and JOBS (tests side by side) may be set:
#   make book PYTHON=/usr/bin/python3.12 PORT=9000
# SOLUTIONS=0 builds the website without the labs' solutions, into a separate folder, free of older pages.

PYTHON ?= python3
PORT   ?= 8000
# Tests often wait for ranks, pages or a time limit, so run two more processes than there are cores, six at most.
JOBS   ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$(( cores < 5 ? cores + 2 : 6 )))
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
                $(wildcard book/authoring/*.* book/twin/*.js book/widgets/*.js book/widgets/*.css)
AS_ROOT      := $(if $(filter 0,$(shell id -u)),--allow-root)

POINTS ?= 2
# tests/suite.py has the longest modules begin first; xdist would go by the number of tests.
PYTEST    := $(BIN)/python -m pytest --nbval -rfEs --dist loadscope --no-loadscope-reorder
NOTEBOOKS := chapters labs
TESTS     ?= tests $(NOTEBOOKS)

.PHONY: help book site lab check quick test test-all new-lab new-exercise bench gpu clean
.DEFAULT_GOAL := help

help:
	@echo "make book      read the book: build the website and serve it on this machine (no torch needed)"
	@echo "make lab       do the labs: open student copies in JupyterLab"
	@echo "make check     what ruff, mypy and the rules for notebooks find (seconds, no torch needed)"
	@echo "make quick     the tests that take hardly any time: no browser, no notebook (a minute)"
	@echo "make test      these, the website in a browser, and every notebook run again with nbval (11 minutes)"
	@echo "make test-all  everything: also ranks of all kinds, answers to the labs, grading, attacks (40 minutes)"
	@echo "make site      only build the website, into $(HTML) (SOLUTIONS=0: without the labs' solutions)"
	@echo "make new-lab NAME=16_name                      write a lab without exercises, in labs/"
	@echo "make new-exercise LAB=16_name NAME=function    add an exercise to it (POINTS=2, DEPENDS='1 2')"
	@echo "make bench     measure launching, the ring, the simulator, the pages and grading here, and write the page of measurements"
	@echo "make gpu       on a machine with GPUs: labs, chapters and measurements on NCCL, and a report"
	@echo "make clean     remove what was built (the environment and your lab answers stay)"

book: $(SITE_STAMP)
	@echo "The book is at http://127.0.0.1:$(PORT)/ (Ctrl-C stops)"
	@$(BIN)/python -m http.server $(PORT) --bind 127.0.0.1 --directory $(HTML)

site: $(SITE_STAMP)
	@echo "The website is in $(HTML); open $(HTML)/index.html or run 'make book'."

check: $(CHECK_STAMP) $(BOOK_STAMP)
	@$(BIN)/ruff check
	@$(BIN)/mypy
	@$(BIN)/python -m book.authoring normalise --check chapters labs
	@$(BIN)/python -m book.authoring lint chapters labs

quick: $(ALL_STAMP)
	@$(PYTEST) tests -m "not slow and not browser" -q -n $(JOBS)

test: $(MORE_STAMP)
	@echo "== Testing: the package, the website in a browser, every notebook (11 minutes on two cores)"
	@$(PYTEST) tests $(NOTEBOOKS) -m "not slow" -n $(JOBS)

test-all: $(MORE_STAMP)
	@echo "== Testing everything (40 minutes on two cores)"
	@$(PYTEST) $(TESTS) -n $(JOBS)

gpu: $(MORE_STAMP)
	@$(BIN)/python -m benchmarks.gpu

new-lab: $(ALL_STAMP)
	@$(BIN)/python -m book.authoring new-lab "$(NAME)"

new-exercise: $(ALL_STAMP)
	@$(BIN)/python -m book.authoring new-exercise "$(LAB)" "$(NAME)" --points "$(POINTS)" --depends $(DEPENDS)

lab: $(ALL_STAMP)
	@$(BIN)/lockstep release labs -o student
	@echo "== Opening JupyterLab on student/ (no browser? copy the address below; Ctrl-C twice ends it)"
	@JUPYTER_CONFIG_PATH=book/authoring/jupyter $(BIN)/jupyter lab --ServerApp.ip=127.0.0.1 --notebook-dir=. --LabApp.default_url=/lab/tree/student --log-level=ERROR --LabApp.log_level=ERROR $(AS_ROOT)

bench: $(MORE_STAMP) $(SITE_STAMP)
	@$(BIN)/python -m benchmarks --keep

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
	@echo "== Installing the frameworks that chapter 14 runs, torchft, and what makes slides"
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
