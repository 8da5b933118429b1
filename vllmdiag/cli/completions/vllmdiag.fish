# Completion of vllmdiag for fish. The program itself says what may stand here: verbs, options, live pids, causes.
function __vllmdiag_complete
    set -l words (commandline -opc)
    set -l last (commandline -ct)
    set -l found (env VLLMDIAG_COMPLETE=1 $words "$last" 2>/dev/null)
    if set -q found[1]
        printf '%s\n' $found
    else
        __fish_complete_path "$last"
    end
end
complete -c vllmdiag -f -a '(__vllmdiag_complete)'
