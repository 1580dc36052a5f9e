//! Compares the strategies in simulated time, as paper 001 measured them in its section 5.3, at a
//! 32nd of its sizes and rates. Only ratios are meaningful.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]
// The test prints tables.
#![allow(clippy::print_stdout)]

mod simulate;
mod workload;

use longhaul_engine::strategy::Strategy;
use simulate::{Move, Outcome, Setting};
use workload::Workload;

/// A gigabyte, at a 32nd, in blocks.
const GIGABYTE: u64 = 8192;
const LAN: f64 = 0.001;
/// The guest's writes to memory: a tenth of the link.
const MEMORY_PER_S: f64 = 90.0;

fn setting(strategy: Strategy, workload: Workload) -> Setting {
    Setting {
        strategy,
        workload,
        rtt_s: LAN,
        share: None,
        memory_blocks: GIGABYTE,
        file_only: false,
        memory_per_s: MEMORY_PER_S,
    }
}

fn run(setting: Setting) -> Outcome {
    let outcome = Move::new(setting).run();
    println!(
        "{:<9} {:<9} rtt {:>3.0} ms share {:>8} | {:>6.1} s {:>6.0} MB, \
         still {:>6.2} s, guest {:>4.2}",
        format!("{:?}", setting.workload),
        match setting.strategy.before {
            longhaul_engine::strategy::Before::BelowThreshold(times) => format!("hybrid {times}"),
            _ => setting.strategy.name.to_owned(),
        },
        setting.rtt_s * 1e3,
        setting
            .share
            .map_or("usual".to_owned(), |(first, later)| format!(
                "{first} {later}"
            )),
        outcome.seconds,
        outcome.bytes / 1e6,
        outcome.downtime,
        outcome.throughput,
    );
    outcome
}

#[test]
fn under_ior_hybrid_is_sooner_and_sends_less_than_the_others() {
    let of = |strategy| run(setting(strategy, Workload::Ior));
    let hybrid = of(Strategy::HYBRID);
    let mirror = of(Strategy::MIRROR);
    let precopy = of(Strategy::PRECOPY);
    assert!(hybrid.seconds < 0.6 * mirror.seconds && hybrid.bytes < 0.6 * mirror.bytes);
    assert!(hybrid.seconds < 0.4 * precopy.seconds && hybrid.bytes < 0.4 * precopy.bytes);
    assert!(hybrid.throughput > mirror.throughput);
}

#[test]
#[ignore = "the tables of docs/decisions/0015"]
fn tables() {
    for workload in Workload::ALL {
        for strategy in [
            Strategy::HYBRID,
            Strategy::MIRROR,
            Strategy::PRECOPY,
            Strategy::POSTCOPY,
            Strategy::SHARED,
        ] {
            run(setting(strategy, workload));
        }
    }
    println!("-- thresholds");
    for workload in Workload::ALL {
        for threshold in [1, 2, 3, 5, 10] {
            run(Setting {
                memory_blocks: 4 * GIGABYTE,
                file_only: true,
                ..setting(Strategy::hybrid(threshold), workload)
            });
        }
    }
    println!("-- shares");
    for workload in Workload::ALL {
        for share in [
            (0.0, 0.0),
            (0.25, 0.0),
            (0.5, 0.0),
            (0.5, 0.5),
            (0.75, 0.0),
            (0.9, 0.0),
        ] {
            for memory_per_s in [90.0, 600.0] {
                print!("{memory_per_s:>4} ");
                run(Setting {
                    share: Some(share),
                    memory_per_s,
                    ..setting(Strategy::HYBRID, workload)
                });
            }
        }
    }
    println!("-- what the guest is at when it is stopped");
    for strategy in [Strategy::HYBRID, Strategy::MIRROR, Strategy::POSTCOPY] {
        let outcomes = (0..10).map(|n| {
            run(Setting {
                memory_blocks: GIGABYTE + n * 500,
                ..setting(strategy, Workload::Ior)
            })
        });
        let guest: f64 = outcomes.map(|outcome| outcome.throughput).sum();
        println!("{} on average: {:.2}", strategy.name, guest / 10.0);
    }
    println!("-- far");
    for workload in Workload::ALL {
        for strategy in [Strategy::HYBRID, Strategy::MIRROR, Strategy::POSTCOPY] {
            run(Setting {
                rtt_s: 0.02,
                ..setting(strategy, workload)
            });
        }
    }
}
