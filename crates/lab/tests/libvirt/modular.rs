//! The daemon that has QEMU alone, as newer distributions start it.

use crate::{agents, deaths};
use longhaul_lab::installed;
use longhaul_lab::libvirt::Release;

#[test]
fn agents_move_a_domain_of_virtqemud_with_all_that_it_has() {
    if installed::is_its_day(1, 2) {
        agents::everything_moves_there_and_back(Release::Modular);
    }
}

#[test]
fn a_domain_of_virtqemud_survives_the_deaths_of_agents_and_daemons() {
    if installed::is_its_day(0, 2) {
        deaths::survives_with_virtqemud();
    }
}
