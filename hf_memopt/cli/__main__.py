import sys

from hf_memopt.cli import main

sys.exit(main())
