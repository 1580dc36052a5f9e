//! Tests the checks, and the bench itself with what is here.

use super::*;
use crate::bench::document::Document;
use clap::Parser;

#[derive(Debug, Parser)]
struct Command {
    #[command(flatten)]
    options: Options,
}

fn options(arguments: &[&str]) -> Options {
    let words = std::iter::once("bench").chain(arguments.iter().copied());
    Command::parse_from(words).options
}

fn row(system: &str, case: &str, way: Way, congestion: &'static str, bps: f64) -> Row {
    let system = SYSTEMS.iter().find(|it| it.name() == system).unwrap();
    Row {
        outcome: "completed".to_owned(),
        way: Some(way),
        congestion: Some(congestion),
        throughput_bps: Some(bps),
        ..Row::of(*system, None, case, None, 1)
    }
}

fn trip(system: &str, p50: f64) -> Row {
    Row {
        way: None,
        congestion: None,
        throughput_bps: None,
        latency_us: Latency {
            p50: Some(p50),
            p99: Some(2.0 * p50),
        },
        ..row(system, BARE, Way::Forth, "cubic", 0.0)
    }
}

fn judged(rows: &[Row], systems: &[&str]) -> Vec<(String, Option<f64>, bool)> {
    let mut results = Results::default();
    rows.iter().for_each(|row| results.add(row));
    let chosen: Vec<&'static dyn System> = SYSTEMS
        .iter()
        .copied()
        .filter(|system| systems.contains(&system.name()))
        .collect();
    let mut document = Document::new("network");
    results.judge(&mut document, &chosen);
    let value = serde_json::to_value(&document).unwrap();
    let checks = value["checks"].as_array().unwrap().iter();
    checks
        .map(|check| {
            (
                check["name"].as_str().unwrap().to_owned(),
                check["value"].as_f64(),
                check["holds"].as_bool().unwrap(),
            )
        })
        .collect()
}

#[test]
fn the_bars_are_computed_from_the_worse_direction_and_the_best_peer() {
    let both = |system: &str, forth: f64, back: f64| {
        [
            row(system, BARE, Way::Forth, "cubic", forth),
            row(system, BARE, Way::Back, "cubic", back),
        ]
    };
    let rows: Vec<Row> = [
        both("longhaul", 8e9, 6e9),
        both("tinc", 1e9, 1e9),
        both("fastd", 2e9, 2e9),
        both("nebula", 4e9, 3e9),
        [trip("veth", 10.0), trip("longhaul", 150.0)],
        [
            row("veth", "1gbit_20ms", Way::Forth, "bbr", 940e6),
            row("longhaul", "1gbit_20ms", Way::Forth, "bbr", 900e6),
        ],
        [
            row("veth", "1gbit_20ms_1%", Way::Forth, "bbr", 900e6),
            row("longhaul", "1gbit_20ms_1%", Way::Forth, "bbr", 700e6),
        ],
    ]
    .concat();
    let all = ["veth", "longhaul", "tinc", "fastd", "nebula"];
    let checks = judged(&rows, &all);
    let expected = [
        ("throughput_vs_best_layer2.veth", Some(3.0), false),
        ("throughput_vs_best_layer3.veth", Some(2.0), true),
        ("added_round_trip_us.veth", Some(140.0), true),
        ("share_of_raw.1gbit_20ms_bbr", Some(900.0 / 940.0), true),
        ("share_of_raw.1gbit_20ms_cubic", None, false),
        ("share_of_raw.1gbit_20ms_1%_bbr", Some(700.0 / 900.0), false),
    ];
    let expected = expected.map(|(name, value, holds)| (name.to_owned(), value, holds));
    assert_eq!(checks, expected);
    // What was not asked for is not judged; what was asked for and is missing does not hold.
    assert_eq!(judged(&rows, &["veth", "tinc"]), []);
    let checks = judged(&rows[..2], &["longhaul", "n2n"]);
    let missing = ("throughput_vs_best_layer2.veth".to_owned(), None, false);
    assert_eq!(checks, [missing]);
}

#[test]
fn cases_and_systems_are_chosen_by_name() {
    let names = |arguments: &[&str]| -> Vec<String> {
        let cases = cases(&options(arguments)).unwrap();
        cases.into_iter().map(|case| case.name).collect()
    };
    assert_eq!(names(&[]).len(), 5);
    assert_eq!(names(&["--quick"]), ["veth", "1gbit_20ms", "1gbit_20ms_1%"]);
    assert_eq!(names(&["--workload", "veth"]), ["veth"]);
    assert_eq!(names(&["--link", "10mbit,5ms"]), ["given"]);
    let error = cases(&options(&["--workload", "x"])).unwrap_err();
    assert!(error.to_string().contains("100mbit_20ms"), "{error}");
    assert_eq!(chosen(&options(&[])).unwrap().len(), SYSTEMS.len());
    assert_eq!(chosen(&options(&["--system", "tinc"])).unwrap().len(), 1);
    let error = chosen(&options(&["--system", "x"])).err().unwrap();
    assert!(error.to_string().contains("wireguard-go"), "{error}");
}

/// Needs root and iperf3. Of the peers one is enough here: the bench reports what fails of others.
#[test]
fn systems_join_two_hosts_and_missing_ones_are_skipped() {
    let case = Case {
        time: Duration::from_secs(1),
        algorithms: &["cubic"],
        ways: &[Way::Back],
        ..cases(&options(&["--workload", "veth"])).unwrap().remove(0)
    };
    let names = ["veth", "longhaul", "vxlan", "openvpn-tap"];
    let systems: Vec<&'static dyn System> = SYSTEMS
        .iter()
        .copied()
        .filter(|system| names.contains(&system.name()))
        .collect();
    let mut document = Document::new("network");
    let mut results = Results::default();
    let options = options(&["--repeat", "1"]);
    let outcome = measure(&[case], &systems, &options, &mut document, &mut results);
    outcome.unwrap();
    for system in systems {
        let name = system.name();
        let rows = document.rows().iter().filter(|row| row["system"] == name);
        let rows: Vec<_> = rows.collect();
        if let Err(why) = system.version() {
            assert!(!["veth", "vxlan"].contains(&name), "{why}");
            assert_eq!(rows.len(), 1, "{rows:?}");
            assert_eq!(rows[0]["outcome"], format!("skipped: {why}"));
            continue;
        }
        let bps = results.bps(name, BARE, true, "cubic");
        assert!(bps.is_some_and(|bps| bps > 1e6), "{rows:?}");
        assert!(results.round_trip(name, BARE).is_some(), "{rows:?}");
        assert!(rows.iter().all(|row| row["mtu"].is_u64()), "{rows:?}");
    }
}
