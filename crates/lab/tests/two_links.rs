//! Tests a move over two links at once, of which one is cut in the middle, end to end.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use common::{LIMIT, Stage, tiny};
use longhaul_api::Phase;
use longhaul_lab::guest::Chipset;
use longhaul_lab::process::wait_until;
use std::time::Duration;

const LINK: &str = "50mbit,20ms";
const CALM: u64 = 100;
/// What each link must have carried before one is cut.
const BYTES: u64 = 2 << 20;

#[test]
fn a_move_over_two_links_goes_on_over_one() {
    let Some(stage) = Stage::over_two_links("two links", ["10.0", "10.0"], [LINK, LINK]) else {
        return;
    };
    let mut guest = stage.boot(&tiny("striped", Chipset::Q35, "10.0", 1), CALM);
    let mut moving = guest.migrate(&stage, 0, &["--verify"]);
    assert!(
        moving.wait_for_phase(Phase::Precopy, LIMIT),
        "{}",
        moving.so_far().why()
    );
    // The first one has the control connection too.
    let links = [stage.lab.link(0, 1), stage.lab.second_link(0, 1)].map(Result::unwrap);
    let carried = || links.map(|link| link.stats().unwrap().forth.carried_bytes);
    let both = wait_until(LIMIT, || carried().iter().all(|bytes| *bytes > BYTES));
    assert!(both, "{:?}", carried());
    links[0].cut(Duration::from_secs(3600)).unwrap();
    let finished = moving.finish(LIMIT).unwrap();
    let lost = links[0].stats().unwrap().forth.dropped_cut;
    assert!(lost > 0, "it ended before the cut");
    guest.assert_moved(&stage, 0, &finished);
    assert!(!finished.interruption_seen, "the hosts stayed connected");
    let report = finished.report.as_ref().unwrap();
    assert_eq!(report.interruptions, Some(0));
    let paths = &report.paths;
    assert_eq!(paths.len(), 2, "{paths:?}");
    for (host_address, up) in [("10.77.0.2:7400", false), ("10.78.0.2:7400", true)] {
        let path = paths.iter().find(|path| path.to == host_address).unwrap();
        assert!(path.sent_bytes > BYTES, "{paths:?}");
        assert_eq!(path.up, up, "{paths:?}");
    }
    let sum: u64 = paths.iter().map(|path| path.sent_bytes).sum();
    assert!(sum <= report.link_bytes.unwrap(), "{paths:?}");
    let verify = report.verify.as_ref().unwrap();
    assert_eq!(verify.different_blocks, 0, "{verify:?}");
    guest.end(&stage);
}
