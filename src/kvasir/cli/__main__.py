from kvasir.cli import main

main()
