#!/usr/bin/env bash
# A real Slurm on this machine's loopback, without systemd and apart from any other.
#   cluster.sh start ROOT NODES | kill ROOT NODE | stop ROOT;   then: export SLURM_CONF=ROOT/etc/slurm.conf
# Each slurmd lives in a pid namespace of its own, so that killing its one process kills the node: slurmd, its steps and all
# that they started, as a machine that loses power would.
set -euo pipefail
PATH=$PATH:/usr/sbin:/sbin
action=$1 root=$2
export SLURM_CONF=$root/etc/slurm.conf

start() { # name, command...
    setsid nohup "${@:2}" >"$root/log/$1.out" 2>&1 </dev/null &
    echo $! >"$root/run/$1.pid"
}

alive() {
    local state
    state=$(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null | cut -c1)
    [ -n "$state" ] && [ "$state" != Z ]
}

end() { # pid file, signal
    local pid
    pid=$(cat "$1")
    kill -"$2" "$pid" 2>/dev/null || true
    for _ in {1..100}; do
        alive "$pid" || break
        sleep 0.05
    done
    kill -KILL "$pid" 2>/dev/null || true
    rm -f "$1"
}

configure() { # nodes
    local track=proctrack/pgid
    if [ -w /sys/fs/cgroup/freezer ]; then track=proctrack/cgroup; fi # linuxproc loses children that fork twice
    printf 'CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\nCgroupAutomount=no\n' >"$root/etc/cgroup.conf"
    {
        cat <<EOF
ClusterName=test
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$root/run/munge.socket,cred_expire=5
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
StateSaveLocation=$root/state
SlurmdSpoolDir=$root/spool/%n
SlurmctldPidFile=$root/run/slurmctld.own
SlurmdPidFile=$root/run/slurmd.%n.own
SlurmctldLogFile=$root/log/slurmctld.log
SlurmdLogFile=$root/log/slurmd.%n.log
ProctrackType=$track
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=0,sched_min_interval=0
SlurmdParameters=config_overrides
MailProg=/bin/true
ReturnToService=2
SlurmdTimeout=45
KillWait=30
CompleteWait=0
MinJobAge=3600
PropagateResourceLimits=NONE
NodeName=DEFAULT CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 RealMemory=2000
EOF
        for i in $(seq "$1"); do
            echo "NodeName=n$i NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$((port + i))"
        done
        echo "PartitionName=test Nodes=ALL Default=YES MaxTime=60 DefaultTime=30 State=UP"
    } >"$root/etc/slurm.conf"
}

case $action in
start)
    port=$((20000 + RANDOM % 10000))
    mkdir -p "$root"/{etc,run,state,log,spool}
    (umask 077 && head -c 1024 /dev/urandom >"$root/etc/munge.key")
    configure "$3"
    start munged munged -F --key-file="$root/etc/munge.key" --socket="$root/run/munge.socket" --seed-file="$root/run/seed" \
        --pid-file="$root/run/munged.own" --log-file="$root/log/munged.log"
    for _ in {1..100}; do
        munge -S "$root/run/munge.socket" -n >/dev/null 2>&1 && break
        sleep 0.05
    done
    start slurmctld slurmctld -D -f "$SLURM_CONF"
    for i in $(seq "$3"); do
        mkdir -p "$root/spool/n$i"
        start "slurmd.n$i" unshare --pid --fork --mount-proc --kill-child=KILL -- slurmd -D -N "n$i" -f "$SLURM_CONF"
    done
    for _ in {1..300}; do
        [ "$(sinfo -h -t idle -N -o %N 2>/dev/null | sort -u | wc -l)" = "$3" ] && exit 0
        sleep 0.1
    done
    cat "$root"/log/*.out >&2
    exit 1
    ;;
kill) kill -KILL "$(cat "$root/run/slurmd.$3.pid")" && rm "$root/run/slurmd.$3.pid" ;;
stop)
    for job in $(squeue -h -o %A 2>/dev/null | sort -u); do scancel "$job" || true; done
    for file in "$root"/run/slurmd.*.pid; do if [ -e "$file" ]; then end "$file" KILL; fi; done
    for name in slurmctld munged; do if [ -e "$root/run/$name.pid" ]; then end "$root/run/$name.pid" TERM; fi; done
    find /sys/fs/cgroup/freezer -mindepth 1 -depth -type d -path '*/slurm_n*' -exec rmdir {} + 2>/dev/null || true
    ;;
esac
