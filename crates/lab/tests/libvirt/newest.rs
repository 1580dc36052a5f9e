//! The newest libvirt, with the newest QEMU.

use crate::{agents, deaths, phases};
use longhaul_lab::installed;
use longhaul_lab::libvirt::Release;

#[test]
fn phases_move_a_domain_there_and_back() {
    if installed::is_its_day(1, 2) {
        phases::move_a_domain_there_and_back(Release::Newest);
    }
}

#[test]
fn agents_move_a_domain_with_all_that_it_has() {
    agents::everything_moves_there_and_back(Release::Newest);
}

#[test]
fn a_domain_survives_the_deaths_of_agents_and_daemons() {
    deaths::survives_on_the_newest();
}
