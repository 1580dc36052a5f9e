//! Tests what clients of a guest see of its move: connections go on, and what was sent to the
//! guest while it was stopped arrives.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stderr
)]

mod common;

use common::{LIMIT, Stage, tiny};
use longhaul_lab::clients::{Client, EVERY, Loop, Seen, bulk, datagrams, download, session};
use longhaul_lab::guest::{Chipset, network};
use longhaul_lab::process::wait_until;

const LINK: &str = "200mbit,20ms";

#[test]
fn clients_of_a_guest_notice_only_its_downtime() {
    let networks: toml::Table = toml::from_str(&format!(
        "[networks.{}]\nbridge = \"{}\"",
        network::NETWORK,
        network::BRIDGE
    ))
    .unwrap();
    let qemus = ["10.0", "10.0"];
    let Some(mut stage) = Stage::with("clients of a guest", qemus, LINK, &networks) else {
        return;
    };
    stage.lab.add_clients().unwrap();
    for host in 0..2 {
        stage.product.agent_mut(host).unwrap().see_interfaces();
    }
    stage.restart(&[0, 1]);
    let mut guest = tiny("served", Chipset::Q35, "10.0", 1);
    guest.serves_clients = true;
    let mut guest = stage.boot(&guest, 500);
    let clients = stage.lab.clients().unwrap();

    // Bulk fills the room for frames of a stopped guest: single datagrams are counted without it.
    let others: [Loop; 2] = [datagrams, bulk];
    for (from, more) in [(0, &[][..]), (1, &["--early-release"][..])] {
        let all: [Loop; 3] = [download, session, others[from]];
        let all = all.map(|run| Client::start(clients, run).unwrap());
        for client in &all {
            assert!(
                wait_until(LIMIT, || client.has_ended() || client.answers() > 10),
                "not served"
            );
        }
        let finished = guest.migrate(&stage, from, more).finish(LIMIT).unwrap();
        guest.assert_moved(&stage, from, &finished);
        for client in &all {
            let before = client.answers();
            assert!(wait_until(LIMIT, || client.has_ended()
                || client.answers() > before + 10));
        }
        let seen = all.map(|client| client.finish().unwrap());
        let downtime = finished.report.unwrap().downtime;
        eprintln!("{downtime:?}: {seen:?}");
        for Seen {
            longest_gap,
            lost,
            twice,
        } in seen
        {
            // Without the frames that are passed on, all datagrams of the gap would be lost.
            let of_gap = longest_gap.as_millis() / EVERY.as_millis();
            assert!(
                u128::from(lost) <= of_gap / 4 && twice == 0,
                "{lost} of {of_gap} datagrams lost, {twice} came twice"
            );
        }
    }
    guest.end(&stage);
}
