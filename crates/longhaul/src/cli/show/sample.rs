//! Provides sample answers of an agent, for tests of the output.

use longhaul_api::*;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const FINGERPRINT: &str =
    "3f21-9c04-aa17-5be2-0d4e-71c8-6690-f3ab-1e5d-2277-c90a-48b1-e6f0-937c-5a1d-80e4";

fn asked() -> Asked {
    Asked {
        downtime_ms: 300,
        bandwidth_bps: None,
        verify: false,
        patience_ms: 60_000,
        early_release: false,
        keep_memory: false,
        encoding: Encoding::default(),
        convergence: Default::default(),
        group: None,
    }
}

pub(crate) fn plan() -> Plan {
    let mut plan = Plan {
        guest: "web-7".into(),
        source: "lyon-1".into(),
        destination: "paris-2".into(),
        asked: asked(),
        possible: true,
        qemu: Some("10.0.2".into()),
        machine_type: Some("pc-q35-10.0".into()),
        accelerator: Some("kvm".into()),
        vcpus: Some(2),
        memory_bytes: Some(4 * GIB),
        memory_used_bytes: Some(3174 * MIB),
        dirty_rate_bytes_per_s: Some(14 * MIB),
        hot_bytes: Some(210 * MIB),
        rtt_ms: Some(21.2),
        rate_bps: Some(94_000_000),
        checks: vec![
            Check::ok("peer_reachable", "paris-2 reachable, 21 ms, 94 Mbit/s up"),
            Check::ok("machine_type", "QEMU 10.0.2 loads pc-q35-10.0"),
            Check::ok("cpu", "CPU model EPYC-v4 available"),
            Check::ok(
                "destination",
                "image data: one file on both hosts (proved by locks)",
            ),
            Check::warn(
                "memory",
                "4 GiB of memory wanted, 5 GiB free: paris-2 will be almost full",
                "`longhaul host probe paris-2` and `longhaul host` there show more",
            ),
        ],
        predictions: vec![prediction()],
        properties: Properties::default(),
    };
    plan.properties = Properties::planned(&plan, rate(1.42, 1100.0), Follows::Nothing, false);
    plan
}

fn rate(vcpu_s_per_s: f64, measured_ms: f64) -> Option<GuestRate> {
    Some(GuestRate {
        vcpu_s_per_s,
        measured_ms,
        whole_process: false,
    })
}

fn range(low: u64, likely: u64, high: u64) -> Option<PredictedRange> {
    Some(PredictedRange { low, likely, high })
}

fn prediction() -> Prediction {
    Prediction {
        strategy: Strategy::Precopy,
        likelihood_percent: 90,
        link_bytes: range(560 * MIB, 640 * MIB, 730 * MIB),
        total_ms: range(44_000, 58_000, 76_000),
        downtime_ms: range(110, 160, 290),
        stalls: None,
        learned_from: 3,
        if_link_breaks: "waits up to 60 s, then web-7 stays on lyon-1".into(),
        if_source_dies: "before the switch: as without a move; after it: web-7 runs on paris-2"
            .into(),
        note: None,
    }
}

pub(crate) fn migration() -> Migration {
    Migration {
        id: "7f3a0c11d2e3f405".into(),
        guest: "web-7".into(),
        side: Side::Source,
        source: "lyon-1".into(),
        destination: "paris-2".into(),
        strategy: Strategy::Precopy,
        asked: asked(),
        started_unix_ms: 1_800_000_000_000,
        ended_unix_ms: None,
        phase: Phase::Precopy,
        outcome: None,
        reason: None,
        doubt: None,
        progress: None,
    }
}

pub(crate) fn migrations() -> Vec<Migration> {
    let mut completed = migration();
    completed.id = "7f3b000000000000".into();
    completed.guest = "db-1".into();
    completed.side = Side::Destination;
    completed.outcome = Some(Outcome::Completed);
    completed.started_unix_ms -= 7_300_000;
    completed.ended_unix_ms = Some(completed.started_unix_ms + 41_200);
    let mut failed = completed.clone();
    failed.id = "a000000000000000".into();
    failed.outcome = Some(Outcome::Failed);
    vec![migration(), completed, failed]
}

pub(crate) fn in_doubt() -> Migration {
    Migration {
        phase: Phase::HandingOver,
        outcome: Some(Outcome::InDoubt),
        doubt: Some(Doubt {
            since_unix_ms: 1_800_000_041_000,
            record: HandoverRecord::Released,
            generation: 5,
            other_host: "paris-2".into(),
            other_record: Some(HandoverRecord::Ready),
            heard_unix_ms: Some(1_800_000_041_000),
            reachable: Some(false),
            unreachable_because: Some("no answer from 192.0.2.7:7400 within 5 s".into()),
            asked_unix_ms: Some(1_800_000_298_000),
            here: "web-7 is stopped on lyon-1, with all its memory".into(),
            then: "when the two agents meet, the word of paris-2 decides: web-7 runs there if \
                   paris-2 took it, and continues here if it did not"
                .into(),
            ways_out: vec![
                WayOut {
                    run_on: Side::Source,
                    tell: "lyon-1".into(),
                    needs_other_side: true,
                    gives_up_missing: false,
                    only_if: "paris-2 is off for good, or cut off from the disks and networks of \
                              web-7, and web-7 never ran there"
                        .into(),
                    at_stake:
                        "web-7 continues on lyon-1 from the moment at which it was stopped. If \
                               it ran on paris-2 after all, what it did there is lost, and disks \
                               that it wrote to there no longer fit its memory: going on would \
                               damage its file systems"
                            .into(),
                },
                WayOut {
                    run_on: Side::Destination,
                    tell: "paris-2".into(),
                    needs_other_side: true,
                    gives_up_missing: false,
                    only_if: "lyon-1 is off for good, or cut off from the disks and networks of \
                              web-7, and does not run it"
                        .into(),
                    at_stake:
                        "web-7 continues on paris-2 from the moment at which it was stopped. \
                               If it runs on lyon-1 after all, two copies write to the same \
                               disks: its file systems would be damaged"
                            .into(),
                },
            ],
        }),
        ..migration()
    }
}

/// Returns a guest that runs at its destination, whose source does not answer.
pub(crate) fn disconnected() -> Migration {
    let mut doubt = in_doubt().doubt;
    if let Some(doubt) = &mut doubt {
        doubt.record = HandoverRecord::Committed;
        doubt.other_host = "lyon-1".into();
        (doubt.other_record, doubt.heard_unix_ms) = (None, None);
        (doubt.reachable, doubt.unreachable_because) = (None, None);
        doubt.here = "web-7 runs on paris-2, and waits when it reads what is missing".into();
        doubt.then = "when the two agents connect, lyon-1 sends what is missing: 18874368 bytes \
                      of disk vda"
            .into();
        doubt.ways_out = vec![WayOut {
            run_on: Side::Destination,
            tell: "paris-2".into(),
            needs_other_side: true,
            gives_up_missing: true,
            only_if: "lyon-1 and its disks never come back, and it does not run web-7".into(),
            at_stake: "18874368 bytes of disk vda: they read as zeros from now on, and are lost"
                .into(),
        }];
    }
    Migration {
        side: Side::Destination,
        phase: Phase::Finishing,
        outcome: None,
        doubt,
        ..migration()
    }
}

/// Returns a guest that runs at its destination, which fetches the missing blocks of a disk.
pub(crate) fn fetching() -> Migration {
    let mut progress = progress();
    progress.phase = Phase::Finishing;
    progress.regions.drain(..2);
    let disk = &mut progress.regions[0];
    disk.blocks_pending = 18 * MIB / 4096;
    disk.blocks_settled = disk.blocks_total - disk.blocks_pending;
    (disk.strategy, disk.why, disk.waiting) = (Some(DiskChoice::Hybrid), None, Some(2));
    progress.trouble = Some(
        "what comes cannot be taken, and is tried again every 2 s: disk vda: \
         No space left on device"
            .into(),
    );
    Migration {
        side: Side::Destination,
        phase: Phase::Finishing,
        progress: Some(progress),
        ..migration()
    }
}

const WHY: &str = "the guest's writes take 4 % of the link, so all of the disk can be there \
                   before the guest is stopped";

const BASE: &str = "4f3a91c2d0b74f3a91c2d0b74f3a91c2d0b74f3a91c2d0b74f3a91c2d0b74f3a";

pub(crate) fn progress() -> Progress {
    Progress {
        id: "7f3a0c11d2e3f405".into(),
        elapsed_ms: 27_400,
        phase: Phase::Precopy,
        pass: Some(3),
        regions: vec![
            RegionProgress {
                name: "pc.ram".into(),
                blocks_total: 4 * GIB / 4096,
                blocks_settled: 2970 * MIB / 4096,
                blocks_pending: 1126 * MIB / 4096,
                disk: false,
                strategy: None,
                why: None,
                waiting: None,
                unreadable_byte: None,
            },
            RegionProgress {
                name: "vga.vram".into(),
                blocks_total: 16 * MIB / 4096,
                blocks_settled: 16 * MIB / 4096,
                blocks_pending: 0,
                disk: false,
                strategy: None,
                why: None,
                waiting: None,
                unreadable_byte: None,
            },
            RegionProgress {
                name: "vda".into(),
                blocks_total: 20 * GIB / 4096,
                blocks_settled: 19 * GIB / 4096,
                blocks_pending: GIB / 4096,
                disk: true,
                strategy: Some(DiskChoice::Precopy),
                why: Some(WHY.into()),
                waiting: None,
                unreadable_byte: None,
            },
        ],
        link: LinkProgress {
            rate_bps: Some(91_000_000),
            rtt_ms: Some(21.4),
            sent_bytes: 212 * MIB,
            guest_bytes: Some(3379 * MIB),
            limit_bps: None,
            interrupted_ms: None,
            paths: Vec::new(),
        },
        dirty_rate_bytes_per_s: Some(12 * MIB),
        predicted_downtime_ms: Some(80),
        outpaced: None,
        awaits_bases: false,
        trouble: None,
        remaining_ms: range(11_900, 13_200, 19_000),
        outcome: None,
        reason: None,
    }
}

pub(crate) fn report() -> Report {
    let time = |phase, time_ms| PhaseTime { phase, time_ms };
    let mut report = Report {
        id: "7f3a0c11d2e3f405".into(),
        guest: "web-7".into(),
        side: Side::Source,
        source: "lyon-1".into(),
        destination: "paris-2".into(),
        strategy: Strategy::Precopy,
        strategy_why: None,
        asked: asked(),
        started_unix_ms: 1_800_000_000_000,
        phase: Phase::Finishing,
        outcome: Some(Outcome::Completed),
        reason: None,
        predicted: Some(prediction()),
        judged: Some(Judgements {
            link_bytes: Some(Judgement::Inside),
            total_ms: Some(Judgement::Below),
            downtime_ms: Some(Judgement::Inside),
        }),
        link_bytes: Some(587 * MIB),
        link_bytes_back: Some(2 * MIB),
        paths: Vec::new(),
        memory_bytes: Some(571 * MIB),
        disk_bytes: Some(212 * MIB),
        repository_bytes: Some(412 * MIB),
        arbiter: None,
        arbitrated: false,
        disks: vec![DiskReport {
            name: "vda".into(),
            strategy: DiskChoice::Precopy,
            why: Some(WHY.into()),
            image_bytes: 20 * GIB,
            allocated_bytes: 6554 * MIB,
            base: Some(BASE.into()),
            base_choice: Some(BaseChoice::Whole),
        }],
        bytes: BytesByKind {
            zero_bytes: Some(922 * MIB),
            same_bytes: Some(1229 * MIB),
            reference_bytes: Some(614 * MIB),
            shared_bytes: Some(0),
            kept_bytes: Some(0),
            duplicate_bytes: Some(31 * MIB),
            delta_bytes: Some(118 * MIB),
            delta_encoded_bytes: Some(14 * MIB),
            literal_bytes: Some(1741 * MIB),
            compressed_bytes: Some(571 * MIB),
            rejected_bytes: Some(0),
            device_state_bytes: Some(700_000),
        },
        total_ms: Some(41_300),
        phases: vec![
            time(Phase::Preparing, 1210.0),
            time(Phase::Precopy, 39_900.0),
            time(Phase::Stopping, 33.4),
            time(Phase::Loading, 19.0),
            time(Phase::HandingOver, 11.2),
            time(Phase::Finishing, 120.0),
        ],
        passes: Some(4),
        stop: Some(StopChoice {
            rule: StopRule::Predicted,
            reason: StopReason::WithinLimit,
            predicted_ms: Some(58),
            predicted_at_most_ms: Some(71),
            slowed_percent: None,
        }),
        downtime_ms: Some(63.6),
        downtime: DowntimeParts {
            stop_ms: Some(0.4),
            last_pages_ms: Some(21.0),
            device_state_ms: Some(12.0),
            load_ms: Some(19.0),
            verify_ms: None,
            commit_ms: Some(11.2),
        },
        dirty_rate_bytes_per_s: Some(14 * MIB),
        interruptions: Some(1),
        cost: Cost {
            source: HostCost {
                agent_cpu_s: Some(6.21),
                agent_peak_bytes: Some(41 * MIB),
                qemu_cpu_s: None,
                page_server_cpu_s: None,
            },
            destination: HostCost {
                agent_cpu_s: Some(3.9),
                agent_peak_bytes: Some(38 * MIB),
                qemu_cpu_s: Some(1.0),
                page_server_cpu_s: None,
            },
        },
        verify: Some(VerifyResult {
            regions: 6,
            bytes: 4 * GIB,
            disks: 1,
            disk_bytes: 20 * GIB,
            disk_bytes_stopped: 12 * MIB,
            disks_not_compared: 0,
            different_blocks: 0,
            first_difference: None,
        }),
        faults: None,
        guest_rates: GuestRates {
            before: rate(1.42, 1180.0),
            during: rate(1.36, 39_870.0),
            after: rate(1.44, 2000.0),
        },
        clock: Some(GuestClock {
            told_by: ClockTeller::GuestAgent,
            before_ms: -2140,
            after_ms: 1,
            set: true,
        }),
        hooks: vec![HookRun {
            step: "released".into(),
            time_ms: 4.2,
            guest_stood_still: true,
            error: None,
        }],
        memory_file: None,
        kept_memory: Some(KeptMemoryReport {
            bytes: 3174 * MIB,
            whole: true,
        }),
        properties: Properties::default(),
    };
    report.properties = Properties::of(&report);
    report
}

pub(crate) fn host() -> Host {
    Host {
        name: "lyon-1".into(),
        fingerprint: FINGERPRINT.into(),
        not_writable: vec![],
        version: "0.1.0".into(),
        protocol_versions: vec![1],
        listen: Some("0.0.0.0:7400".into()),
        api_listen: None,
        state_folder: "/var/lib/longhaul".into(),
        qemus: vec![Qemu {
            name: "debian".into(),
            version: Some("10.0.2".into()),
            path: "/usr/bin/qemu-system-x86_64".into(),
        }],
        kvm: Some(false),
        memory_total_bytes: Some(24 * GIB),
        memory_free_bytes: Some(22 * GIB),
        guests_running: Some(4),
        pid: 812,
    }
}

pub(crate) fn trusted_hosts() -> Vec<TrustedHost> {
    vec![TrustedHost {
        name: "paris-2".into(),
        fingerprint: FINGERPRINT.into(),
        addresses: vec!["192.0.2.7:7400".into()],
        may: vec![Scope::Query, Scope::Send],
    }]
}

pub(crate) fn guests() -> Vec<Guest> {
    let running = Guest {
        attached: false,
        owner: longhaul_api::GuestOwner::Longhaul,
        obstacle: None,
        name: "web-7".into(),
        state: GuestState::MovingOut,
        state_detail: Some("to paris-2".into()),
        qemu: Some("10.0.2".into()),
        machine_type: Some("pc-q35-10.0".into()),
        accelerator: Some("kvm".into()),
        vcpus: Some(2),
        memory_bytes: Some(4 * GIB),
        pid: Some(4711),
        generation: Some(3),
        migration: Some("7f3a0c11d2e3f405".into()),
        coming: None,
        channels: Default::default(),
    };
    let mut stopped = running.clone();
    stopped.name = "db-1".into();
    stopped.state = GuestState::Stopped;
    stopped.state_detail = None;
    stopped.qemu = None;
    stopped.accelerator = None;
    stopped.pid = None;
    stopped.generation = None;
    let mut arrived = running.clone();
    arrived.name = "ci-3".into();
    (arrived.state, arrived.state_detail) = (GuestState::Running, None);
    arrived.migration = None;
    let coming = "its base image 3fa4c2900d17 comes: 310 MiB of 1002 MiB, 2 reads wait (the image \
                  repository s3://images cannot be reached: no route to host)";
    arrived.coming = Some(coming.into());
    vec![running, stopped, arrived]
}

pub(crate) fn probe() -> ProbeResult {
    ProbeResult {
        host: "paris-2".into(),
        version: Some("0.1.0".into()),
        rtt_ms: Some(21.2),
        rate_bps: Some(94_000_000),
        rtt_loaded_ms: Some(24.8),
        rate_late_bps: Some(95_100_000),
        wire_rate_bps: Some(99_200_000),
        per_second_bps: Vec::new(),
        paths: Vec::new(),
        loss: Some(0.0024),
        seen_as: Some("203.0.113.5:61000".into()),
        local_address: Some("10.0.0.4:7400".into()),
    }
}
